//! Tests that numbers in the docs are the values of the constants that the docs name after them.

use std::collections::BTreeMap;
use std::fs;

use regex::Regex;

use super::repository;
use crate::support::add_files;

/// Returns the values of the integer constants in Rust code, by name. If several constants have the same name, it has
/// several values. Leaves out values that are not a number, a name, or a product or shift of numbers and names.
fn constants(code: &str) -> BTreeMap<&str, Vec<u64>> {
    let pattern = Regex::new(r"\bconst ([A-Z][A-Z0-9_]*): [iu](?:\d+|size) = ([^;]+);").unwrap();
    let mut expressions: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for found in pattern.captures_iter(code) {
        let [name, expression] = found.extract().1;
        expressions.entry(name).or_default().push(expression);
    }
    let value_of = |expression: &&str| value(expression, &expressions);
    expressions.iter().map(|(&name, found)| (name, found.iter().filter_map(value_of).collect())).collect()
}

/// Returns the value of an expression: a number, the name of a constant, or a product or shift of numbers and names.
fn value(expression: &str, expressions: &BTreeMap<&str, Vec<&str>>) -> Option<u64> {
    let operands = |(left, right)| Some((value(left, expressions)?, value(right, expressions)?));
    if let Some(split) = expression.split_once(" << ") {
        operands(split).and_then(|(left, right)| left.checked_shl(right as u32))
    } else if let Some(split) = expression.rsplit_once(" * ") {
        operands(split).and_then(|(left, right)| left.checked_mul(right))
    } else if let Some([expression]) = expressions.get(expression).map(Vec::as_slice) {
        value(expression, expressions)
    } else {
        expression.replace('_', "").parse().ok()
    }
}

#[test]
fn constants_can_be_products_and_shifts() {
    let code = "const A: usize = 1_024;\npub const B: u64 = 2 * A;\nconst C: u32 = 3 << 20;\nconst D: u8 = f();";
    let constants = constants(code);
    assert_eq!(
        ["A", "B", "C", "D"].map(|name| constants[name].clone()),
        [vec![1024], vec![2048], vec![3 << 20], vec![]]
    );
}

/// A number is checked if the name of its constant follows in parentheses: "128 MiB (`MAX_ARENA_BYTES`)".
#[test]
fn numbers_before_constants_are_their_values() {
    let mut files = Vec::new();
    add_files(&repository().join("src"), &["rs"], &mut files);
    let code: String = files.iter().map(|file| fs::read_to_string(file).unwrap()).collect();
    let constants = constants(&code);
    let pattern = Regex::new(r"([\d,]+)( MiB)?\s\(`([A-Z][A-Z0-9_]+)`\)").unwrap();
    let mut pages = vec![repository().join("README.md")];
    add_files(&repository().join("docs"), &["md"], &mut pages);
    let mut count = 0;
    for path in pages {
        let page = fs::read_to_string(&path).unwrap();
        for found in pattern.captures_iter(&page) {
            let number: u64 = found[1].replace(',', "").parse().unwrap();
            let number = if found.get(2).is_some() { number << 20 } else { number };
            let values = constants.get(&found[3]).map_or(&[][..], Vec::as_slice);
            assert_eq!(values, [number], "{}: '{}' differs from the code", path.display(), &found[0]);
            count += 1;
        }
    }
    assert!(count > 5, "found only {count} numbers with the name of a constant");
}
