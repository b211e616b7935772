//! Compares the `#[repr(C)]` structs of Rust with the CUDA structs that they mirror.
//! If the fields have the same names, sizes and order, both compilers choose the same layout.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::support::add_files;

/// The fields of a struct in their order: each name, and the Rust type with the array length, if any.
type Fields = Vec<(String, String)>;

/// A Rust struct for a kernel argument, and the CUDA struct that it mirrors.
struct Mirror {
    rust_name: String,
    rust_fields: Fields,
    cuda_name: String,
    cuda_file: String,
}

/// Returns the `#[repr(C)]` structs in Rust code. Each must have a comment like "Mirrors `Sizes` in `experts.cu`."
fn mirrors(code: &str) -> Vec<Mirror> {
    let mut mirrors = Vec::new();
    for (start, _) in code.match_indices("#[repr(C)]") {
        let (before, after) = code.split_at(start);
        let comment = before.rsplit_once("\n\n").map_or(before, |(_, comment)| comment);
        let words: Vec<&str> = comment.split_once("/// Mirrors").map_or("", |(_, text)| text).split('`').collect();
        let (after, body) = after.split_once(" {\n").unwrap();
        let rust_name = after.rsplit(' ').next().unwrap().to_string();
        assert!(words.len() > 4 && words[2] == " in ", "{rust_name}: no comment names the CUDA struct");
        let lines = body.split_once('}').unwrap().0.lines().map(str::trim).filter(|line| !line.starts_with("//"));
        let field = |line: &str| {
            let (name, of_type) = line.trim_end_matches(',').split_once(": ")?;
            // `[u64; 4]` becomes `u64[4]`.
            let of_type = of_type.trim_start_matches('[').replace("; ", "[");
            Some((name.rsplit(' ').next()?.to_string(), of_type))
        };
        let rust_fields = lines.filter_map(field).collect();
        mirrors.push(Mirror { rust_name, rust_fields, cuda_name: words[1].into(), cuda_file: words[3].into() });
    }
    mirrors
}

/// Returns the fields of a CUDA struct. `rust_names` maps the names of mirrored CUDA structs to their Rust names.
fn cuda_fields(code: &str, name: &str, rust_names: &BTreeMap<String, String>) -> Fields {
    let (_, body) = code.split_once(&format!("struct {name} {{\n")).unwrap_or_else(|| panic!("no struct {name}"));
    let body = body.split_once("\n};").unwrap().0;
    let lines: Vec<&str> = body.lines().map(|line| line.split("//").next().unwrap().trim()).collect();
    let body = lines.join(" ");
    // Functions follow the fields.
    let fields = body.split("__device__").next().unwrap().split(';').map(str::trim);
    let mut result = Vec::new();
    for field in fields.filter(|field| !field.is_empty() && !field.starts_with("static")) {
        let field = field.trim_start_matches("const ");
        let end = field.find([' ', '*']).unwrap();
        let of_type = match &field[..end] {
            "int" => "i32",
            "float" => "f32",
            other => rust_names.get(other).map_or("no type except int and float", String::as_str),
        };
        for declared in field[end..].split(',') {
            let of_type = if declared.contains('*') { "u64" } else { of_type };
            let declared = declared.rsplit('*').next().unwrap().trim();
            let (name, length) = declared.split_at(declared.find('[').unwrap_or(declared.len()));
            result.push((name.to_string(), format!("{of_type}{length}")));
        }
    }
    result
}

#[test]
fn rust_structs_for_kernels_have_the_fields_of_the_cuda_structs() {
    let mut paths = Vec::new();
    add_files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/kernels"), &["rs", "cu", "cuh"], &mut paths);
    let read = |path: &PathBuf| fs::read_to_string(path).unwrap();
    let is_rust = |path: &&PathBuf| path.extension().is_some_and(|extension| extension == "rs");
    let mirrors: Vec<Mirror> = paths.iter().filter(is_rust).flat_map(|path| mirrors(&read(path))).collect();
    let rust_names = mirrors.iter().map(|mirror| (mirror.cuda_name.clone(), mirror.rust_name.clone())).collect();
    for Mirror { rust_name, rust_fields, cuda_name, cuda_file } in &mirrors {
        let file = paths.iter().find(|path| path.ends_with(cuda_file)).unwrap_or_else(|| panic!("no {cuda_file}"));
        let want = cuda_fields(&read(file), cuda_name, &rust_names);
        assert_eq!(rust_fields, &want, "{rust_name} must have the fields of {cuda_name} in {cuda_file}");
    }
    assert!(mirrors.len() > 8 && mirrors.iter().all(|mirror| !mirror.rust_fields.is_empty()));
}
