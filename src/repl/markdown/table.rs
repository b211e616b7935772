//! Tables: columns as wide as they need to be, or as the window allows.

use pulldown_cmark::Alignment;

use super::text::{Line, Span, Style, width, wrap};

/// Between two columns.
const BETWEEN: usize = 3;
/// No column is made narrower than this.
const NARROWEST: usize = 4;

/// Lays out rows of cells, the first of which is the header.
pub fn layout(rows: &[Vec<Line>], alignments: &[Alignment], columns: usize) -> Vec<Line> {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    if NARROWEST * count + BETWEEN * count.saturating_sub(1) > columns {
        return blocks(rows, columns);
    }
    let widths = widths(rows, columns);
    let mut lines = Vec::new();
    for (number, row) in rows.iter().enumerate() {
        let cell = |index: usize| row.get(index).map(Vec::as_slice).unwrap_or_default();
        let cells: Vec<Vec<Line>> = widths.iter().enumerate().map(|(index, &width)| wrap(cell(index), width)).collect();
        let height = cells.iter().map(Vec::len).max().unwrap_or(1).max(1);
        for part in 0..height {
            let mut line = Line::new();
            for (index, cell) in cells.iter().enumerate() {
                if index > 0 {
                    line.push(Span::new(" │ ", Style::DIM));
                }
                let text = cell.get(part).cloned().unwrap_or_default();
                let alignment = alignments.get(index).copied().unwrap_or(Alignment::None);
                pad(&mut line, text, widths[index], alignment, index + 1 == cells.len());
            }
            lines.push(line);
        }
        if number == 0 {
            let dashes: Vec<String> = widths.iter().map(|&width| "─".repeat(width)).collect();
            lines.push(vec![Span::new(&dashes.join("─┼─"), Style::DIM)]);
        }
    }
    lines
}

/// For a window that has no room for columns: each row as lines of `header: value`, with an empty line between rows.
fn blocks(rows: &[Vec<Line>], columns: usize) -> Vec<Line> {
    let Some((header, rows)) = rows.split_first() else { return Vec::new() };
    // A header without rows is still something that was said.
    if rows.is_empty() {
        return header.iter().flat_map(|cell| wrap(cell, columns)).collect();
    }
    let mut lines = Vec::new();
    for (number, row) in rows.iter().enumerate() {
        if number > 0 {
            lines.push(Line::new());
        }
        for (index, cell) in row.iter().enumerate().filter(|(_, cell)| !cell.is_empty()) {
            let mut line = header.get(index).cloned().unwrap_or_default();
            if !line.is_empty() {
                line.push(Span::new(": ", Style::DIM));
            }
            line.extend(cell.iter().cloned());
            lines.extend(wrap(&line, columns));
        }
    }
    lines
}

/// What each column needs; if that is too much together, the widest give way.
fn widths(rows: &[Vec<Line>], columns: usize) -> Vec<usize> {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let mut widths: Vec<usize> = (0..count)
        .map(|index| rows.iter().filter_map(|row| row.get(index)).map(|cell| width(cell)).max().unwrap_or(0).max(1))
        .collect();
    let room = columns.saturating_sub(BETWEEN * count.saturating_sub(1));
    let mut too_much = widths.iter().sum::<usize>().saturating_sub(room);
    while too_much > 0 {
        let Some(widest) = widths.iter().copied().max().filter(|&widest| widest > NARROWEST) else { break };
        // All that are widest go down to the next in width, or share what is too much.
        let next = widths.iter().copied().filter(|&width| width < widest).max().unwrap_or(0).max(NARROWEST);
        let with_it = widths.iter().filter(|&&width| width == widest).count();
        let step = (widest - next).min(too_much.div_ceil(with_it)).max(1);
        for width in widths.iter_mut().filter(|width| **width == widest) {
            *width -= step;
            too_much = too_much.saturating_sub(step);
        }
    }
    widths
}

fn pad(line: &mut Line, text: Line, columns: usize, alignment: Alignment, last: bool) {
    let free = columns.saturating_sub(width(&text));
    let before = match alignment {
        Alignment::Right => free,
        Alignment::Center => free / 2,
        Alignment::Left | Alignment::None => 0,
    };
    line.push(Span::plain(&" ".repeat(before)));
    line.extend(text);
    if !last {
        line.push(Span::plain(&" ".repeat(free - before)));
    }
}
