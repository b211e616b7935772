//! Formats the report of `inferno show` as text for a terminal with 120 columns.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::report::{Gpu, MemoryNeeds, ModelFile, ShowReport};
use super::sizes::{ConfigSizes, Rope};
use crate::text::{self, counted, excerpt, home_relative, parameter_count};

const COLUMNS: usize = 120;
/// The column where values start.
const INDENT: usize = 13;
/// The maximum number of rows for files. If rows are omitted, one more row shows how many.
const MAX_FILES: usize = 24;

pub fn table(report: &ShowReport) -> String {
    let mut out = format!("{} ({})\n", report.name, report.location);
    facts(&mut out, report);
    tensors(&mut out, report);
    files(&mut out, &report.files);
    match &report.needs {
        Some(needs) => memory(&mut out, needs, &report.gpu),
        None if report.weights_problem.is_none() => {
            out += "\nmemory needs unknown: the model's config does not determine the KV cache size, \
                    the context length, or both\n";
        }
        None => {}
    }
    out
}

/// Writes the facts about the model, each on a new line.
fn facts(out: &mut String, report: &ShowReport) {
    let mut fact = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            wrapped(out, name, &value);
        }
    };
    fact("revision", report.revision.clone());
    fact("path", report.path.as_deref().map(home_relative));
    let family = report.family.as_deref().map_or("unknown".into(), excerpt);
    fact("family", Some(if report.supported { family } else { format!("{family}, not supported") }));
    fact("why not", report.reason.clone());
    fact("license", Some(report.license.clone().unwrap_or("not stated in the files".into())));
    fact("chat", Some(report.chat.unwrap_or("none; use inferno play --raw").to_string()));
    fact("parameters", report.parameters.map(|all| parameter_counts(all, report.active_parameters)));
    fact("weights", weights(report));
    let sizes = &report.sizes;
    fact("layers", layers(sizes));
    fact(
        "hidden",
        sizes.hidden_size.map(|hidden| format!("{}{}", grouped(hidden), intermediate(sizes.intermediate_size))),
    );
    fact("heads", heads(sizes));
    fact("experts", experts(sizes));
    fact("vocabulary", vocabulary(sizes));
    fact("context", context(sizes));
}

fn parameter_counts(all: u64, active: Option<u64>) -> String {
    match active {
        Some(active) if active != all => {
            format!("{}, {} of them active per token", parameter_count(all), parameter_count(active))
        }
        _ => parameter_count(all),
    }
}

/// Returns the size and the quantization of the weights, or why the size is unknown.
fn weights(report: &ShowReport) -> Option<String> {
    let Some(bytes) = report.weight_bytes else { return report.weights_problem.clone() };
    Some(format!("{}, {}", text::size(bytes), report.quantization.as_deref().map_or("?".into(), excerpt)))
}

fn layers(sizes: &ConfigSizes) -> Option<String> {
    let layers = sizes.layers?;
    Some(match (sizes.sliding_layers, sizes.sliding_window) {
        (Some(sliding), Some(window)) => {
            format!("{layers}, {sliding} of them with a sliding window of {}", grouped(window))
        }
        _ => layers.to_string(),
    })
}

/// Returns text to append to another number, such as `, intermediate 14,336`. Empty if the size is unknown.
fn intermediate(size: Option<u64>) -> String {
    size.map(|size| format!(", intermediate {}", grouped(size))).unwrap_or_default()
}

fn heads(sizes: &ConfigSizes) -> Option<String> {
    let keys = sizes.kv_heads.map(|heads| format!(", {}", counted(heads, "KV head"))).unwrap_or_default();
    let each = sizes.head_dim.map(|dim| format!(", {} each", counted(dim, "dim"))).unwrap_or_default();
    Some(format!("{}{keys}{each}", sizes.heads?))
}

fn experts(sizes: &ConfigSizes) -> Option<String> {
    let chosen = sizes.experts_chosen.map(|chosen| format!(", {chosen} chosen per token")).unwrap_or_default();
    Some(format!("{}{chosen}{}", sizes.experts?, intermediate(sizes.expert_intermediate_size)))
}

fn vocabulary(sizes: &ConfigSizes) -> Option<String> {
    let tied = match sizes.tied_embeddings {
        Some(true) => ", output head tied to the embedding",
        Some(false) => ", separate output head",
        None => "",
    };
    Some(format!("{}{tied}", grouped(sizes.vocab_size?)))
}

fn context(sizes: &ConfigSizes) -> Option<String> {
    let rope = sizes.rope.as_ref().map(rope_facts).unwrap_or_default();
    Some(format!("{} tokens{rope}", grouped(sizes.context?)))
}

/// Returns the RoPE base and the RoPE scaling as text to append to the context length.
/// Example: `, rope theta 150000, scaled yarn by 32 from 4,096`.
fn rope_facts(rope: &Rope) -> String {
    let theta = rope.theta.map(|theta| format!(", rope theta {theta}")).unwrap_or_default();
    if rope.scaling == "default" {
        return theta;
    }
    let factor = rope.factor.map(|factor| format!(" by {factor}")).unwrap_or_default();
    let original = rope.original_context.map(|from| format!(" from {}", grouped(from))).unwrap_or_default();
    format!("{theta}, scaled {}{factor}{original}", excerpt(&rope.scaling))
}

fn tensors(out: &mut String, report: &ShowReport) {
    if report.tensors.is_empty() {
        return;
    }
    let mut rows = vec![["TENSORS", "COUNT", "PARAMS", "SIZE", "DTYPES"].map(String::from)];
    for group in &report.tensors {
        let dtypes: Vec<&str> = group.dtypes.iter().map(String::as_str).collect();
        let (parameters, bytes) = (parameter_count(group.parameters), text::size(group.bytes));
        rows.push([group.name.into(), group.tensors.to_string(), parameters, bytes, dtypes.join(" ")]);
    }
    aligned(out, &rows, &[1, 2, 3]);
}

/// Lists the files. Four or more shards of a model share one row.
fn files(out: &mut String, files: &[ModelFile]) {
    let mut patterns: BTreeMap<String, Vec<&ModelFile>> = BTreeMap::new();
    for file in files {
        patterns.entry(pattern(&file.name)).or_default().push(file);
    }
    let mut rows = Vec::new();
    for (pattern, files) in patterns {
        let name = match files.as_slice() {
            [first, _, _, .., last] if pattern.contains('*') => {
                format!("{} to {} ({})", first.name, last.name, files.len())
            }
            several => {
                rows.extend(several.iter().map(|file| [file.name.clone(), size(file.bytes)]));
                continue;
            }
        };
        let bytes = files.iter().try_fold(0u64, |sum, file| sum.checked_add(file.bytes?));
        rows.push([name, size(bytes)]);
    }
    if rows.len() > MAX_FILES {
        let more = rows.split_off(MAX_FILES).len();
        rows.push([format!("and {more} more"), String::new()]);
    }
    rows.insert(0, ["FILES", "SIZE"].map(String::from));
    aligned(out, &rows, &[1]);
}

/// Replaces the shard number in the name of a weight file with `*`.
fn pattern(name: &str) -> String {
    let Some((before, after)) = name.rsplit_once("-of-") else { return name.to_string() };
    let stem = before.trim_end_matches(|c: char| c.is_ascii_digit());
    if stem.len() == before.len() { name.to_string() } else { format!("{stem}*-of-{after}") }
}

fn memory(out: &mut String, needs: &MemoryNeeds, gpu: &Gpu) {
    let heading = match (&gpu.gpu, &gpu.no_gpu) {
        (Some(info), _) if needs.gpus == 1 => format!("ON THIS GPU, in {}: {info}", needs.dtype),
        (Some(info), _) => format!("ON EACH OF {} GPUS LIKE THIS, in {}: {info}", needs.gpus, needs.dtype),
        (None, reason) => {
            let gpus = if needs.gpus == 1 { "A GPU".to_string() } else { format!("EACH OF {} GPUS", needs.gpus) };
            format!("ON {gpus}, in {} (none found: {})", needs.dtype, reason.as_deref().unwrap_or("unknown reason"))
        }
    };
    let _ = writeln!(out, "\n{}", clipped(&heading));
    wrapped(out, "weights", &text::size(needs.weight_bytes));
    let windows = match needs.cache_bytes_of_windows {
        0 => String::new(),
        bytes => format!(", and {} for sliding windows", text::size(bytes)),
    };
    let estimated = if needs.estimated { " (estimated from config.json)" } else { "" };
    let context = grouped(needs.context as u64);
    let cache = format!(
        "{} in {} blocks for a context of {context}: {} per 1,000 tokens{windows}{estimated}",
        text::size(needs.cache_bytes),
        grouped(needs.cache_blocks as u64),
        text::size(needs.cache_bytes_per_1000_tokens)
    );
    wrapped(out, "cache", &cache);
    let chunk = grouped(needs.chunk as u64);
    wrapped(
        out,
        "workspace",
        &format!("{}, for prompts in chunks of {chunk} tokens", text::size(needs.workspace_bytes)),
    );
    let running = needs.weight_bytes.saturating_add(needs.cache_bytes).saturating_add(needs.workspace_bytes);
    if running < needs.total_bytes {
        let loading = text::size(needs.loading_bytes);
        wrapped(out, "loading", &format!("{loading} more while the model loads, to convert the experts of a layer"));
    }
    let verdict = match (needs.fits, needs.largest_context) {
        (Some(true), Some(largest)) => {
            let sequences = grouped(needs.largest_sequences.unwrap_or(1).max(1) as u64);
            format!(
                ": it fits; the largest context that fits is {} tokens; with --gpu-memory, the KV cache \
                 can hold up to {sequences} × {context} tokens",
                grouped(largest as u64)
            )
        }
        (Some(false), Some(largest)) => {
            format!(": the model does not fit with this context; a shorter context fits: --context {}", largest)
        }
        (Some(_), None) => ": the model does not fit with any context".to_string(),
        (None, _) => String::new(),
    };
    wrapped(out, "total", &format!("{}{verdict}", text::size(needs.total_bytes)));
}

/// Writes a name and its value. Wraps long values between words, and indents all lines after the first.
fn wrapped(out: &mut String, name: &str, value: &str) {
    let mut line = format!("{name:INDENT$}");
    let mut words_in_line = 0;
    for word in value.split_whitespace() {
        if words_in_line > 0 && line.chars().count() + 1 + word.chars().count() > COLUMNS {
            let _ = writeln!(out, "{line}");
            line = " ".repeat(INDENT);
            words_in_line = 0;
        }
        let space = if words_in_line > 0 { " " } else { "" };
        let _ = write!(line, "{space}{word}");
        words_in_line += 1;
    }
    let _ = writeln!(out, "{}", line.trim_end());
}

/// Writes an empty line, then the rows as aligned columns. `right` lists the right-aligned columns.
fn aligned<const N: usize>(out: &mut String, rows: &[[String; N]], right: &[usize]) {
    out.push('\n');
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    for row in rows {
        let cell = |column: usize| {
            let (text, width) = (&row[column], width(column));
            if right.contains(&column) { format!("{text:>width$}") } else { format!("{text:width$}") }
        };
        let cells: Vec<String> = (0..N).map(cell).collect();
        let _ = writeln!(out, "{}", clipped(cells.join("  ").trim_end()));
    }
}

fn clipped(line: &str) -> String {
    if line.chars().count() > COLUMNS {
        line.chars().take(COLUMNS - 1).chain(['…']).collect()
    } else {
        line.to_string()
    }
}

fn size(bytes: Option<u64>) -> String {
    bytes.map_or("?".into(), text::size)
}

/// Formats a number with thousands separators: `131,072`.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let group = |(index, digit): (usize, char)| {
        let comma = index > 0 && (digits.len() - index).is_multiple_of(3);
        comma.then_some(',').into_iter().chain([digit])
    };
    digits.chars().enumerate().flat_map(group).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_and_shard_names_get_a_pattern() {
        assert_eq!([0, 12, 999, 1000, 131_072, 1_000_000].map(grouped).join(" "), "0 12 999 1,000 131,072 1,000,000");
        assert_eq!([12, 1200, 7_600_000, 13_800_000_000].map(text::size).join(" "), "12 B 1.2 KB 7.6 MB 13.8 GB");
        assert_eq!(pattern("model-00001-of-00163.safetensors"), "model-*-of-00163.safetensors");
        assert_eq!(pattern("one-of-a-kind.txt"), "one-of-a-kind.txt");
    }

    #[test]
    fn long_values_are_wrapped_and_indented() {
        let mut out = String::new();
        wrapped(&mut out, "why not", &"because ".repeat(40));
        assert!(out.lines().all(|line| line.chars().count() <= COLUMNS));
        assert!(out.lines().skip(1).all(|line| line.starts_with(&" ".repeat(INDENT))) && out.lines().count() > 2);
    }
}
