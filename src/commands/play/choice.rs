//! Asks the user to choose a model.

use anyhow::Result;

use crate::terminal;

/// Asks for a model's number or name until the input is valid. Returns the model's index, or `None` if the user quits.
pub fn choose(names: &[&str]) -> Result<Option<usize>> {
    loop {
        terminal::write_stderr(&format!("which model? [{}] ", numbers("-", names.len())));
        let mut line = String::new();
        if std::io::stdin().read_line(&mut line)? == 0 || line.trim() == "q" {
            return Ok(None);
        }
        let line = line.trim();
        let number = line.parse::<usize>().ok().filter(|number| (1..=names.len()).contains(number));
        let by_name = names.iter().position(|name| *name == line);
        match number.map(|number| number - 1).or(by_name) {
            Some(index) => return Ok(Some(index)),
            None => terminal::print(&format!("type {}, a name, or q to quit", numbers(" to ", names.len()))),
        }
    }
}

/// Returns the valid numbers as text: `1`, or 1 and `count` with `separator` between them.
fn numbers(separator: &str, count: usize) -> String {
    if count == 1 { "1".into() } else { format!("1{separator}{count}") }
}
