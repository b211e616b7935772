//! Lays out Markdown tables. If a table is wider than the window, its widest columns shrink.
//! If it is still too wide, each cell gets lines of its own.

use pulldown_cmark::Alignment;

use super::super::styled_text::{Span, StyledLine, TextStyle, width, wrap};

/// The width of the separator between two table columns, in character cells.
const SEPARATOR: usize = 3;
/// The minimum width to which a wide table column shrinks, in character cells. Narrower columns keep their width.
const MIN_COLUMN: usize = 4;

/// Lays out a table in a window of `columns` character cells. The first row is the header.
pub fn layout(rows: &[Vec<StyledLine>], alignments: &[Alignment], columns: usize) -> Vec<StyledLine> {
    let Some(widths) = column_widths(rows, columns) else { return stack_cells(rows, columns) };
    let mut lines = Vec::new();
    for (number, row) in rows.iter().enumerate() {
        let cell = |index: usize| row.get(index).map(Vec::as_slice).unwrap_or_default();
        let cells: Vec<Vec<StyledLine>> =
            widths.iter().enumerate().map(|(index, &width)| wrap(cell(index), width)).collect();
        let height = cells.iter().map(Vec::len).max().unwrap_or(1).max(1);
        for part in 0..height {
            let mut line = StyledLine::new();
            for (index, cell) in cells.iter().enumerate() {
                if index > 0 {
                    line.push(Span::new(" │ ", TextStyle::DIM));
                }
                let text = cell.get(part).cloned().unwrap_or_default();
                let alignment = alignments.get(index).copied().unwrap_or(Alignment::None);
                push_aligned(&mut line, text, widths[index], alignment, index + 1 == cells.len());
            }
            lines.push(line);
        }
        if number == 0 {
            let dashes: Vec<String> = widths.iter().map(|&width| "─".repeat(width)).collect();
            lines.push(vec![Span::new(&dashes.join("─┼─"), TextStyle::DIM)]);
        }
    }
    lines
}

/// Lays out a table that does not fit in the window even if its columns shrink:
/// each nonempty cell becomes a line `header: value`.
fn stack_cells(rows: &[Vec<StyledLine>], columns: usize) -> Vec<StyledLine> {
    let Some((header, rows)) = rows.split_first() else { return Vec::new() };
    // Without rows below the header, show the header cells alone.
    if rows.is_empty() {
        return header.iter().flat_map(|cell| wrap(cell, columns)).collect();
    }
    let mut lines = Vec::new();
    for (number, row) in rows.iter().enumerate() {
        if number > 0 {
            lines.push(StyledLine::new());
        }
        for (index, cell) in row.iter().enumerate().filter(|(_, cell)| !cell.is_empty()) {
            let mut line = header.get(index).cloned().unwrap_or_default();
            if !line.is_empty() {
                line.push(Span::new(": ", TextStyle::DIM));
            }
            line.extend(cell.iter().cloned());
            lines.extend(wrap(&line, columns));
        }
    }
    lines
}

/// Returns the width of each table column in character cells. If the table is too wide, the widest columns shrink.
/// Returns `None` if the table is too wide even if no column is wider than [`MIN_COLUMN`].
fn column_widths(rows: &[Vec<StyledLine>], columns: usize) -> Option<Vec<usize>> {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let mut widths: Vec<usize> = (0..count)
        .map(|index| rows.iter().filter_map(|row| row.get(index)).map(|cell| width(cell)).max().unwrap_or(0).max(1))
        .collect();
    let available = columns.checked_sub(SEPARATOR * count.saturating_sub(1))?;
    if widths.iter().map(|&width| width.min(MIN_COLUMN)).sum::<usize>() > available {
        return None;
    }
    let mut excess = widths.iter().sum::<usize>().saturating_sub(available);
    while excess > 0 {
        let Some(widest) = widths.iter().copied().max().filter(|&widest| widest > MIN_COLUMN) else { break };
        // Shrink all columns of the largest width to the next smaller width, or less if that is enough.
        let next_width = widths.iter().copied().filter(|&width| width < widest).max().unwrap_or(0).max(MIN_COLUMN);
        let widest_count = widths.iter().filter(|&&width| width == widest).count();
        let step = (widest - next_width).min(excess.div_ceil(widest_count)).max(1);
        for width in widths.iter_mut().filter(|width| **width == widest) {
            *width -= step;
            excess = excess.saturating_sub(step);
        }
    }
    Some(widths)
}

/// Appends one line of a wrapped cell, aligned in its column. The last column has no trailing spaces.
fn push_aligned(line: &mut StyledLine, text: StyledLine, columns: usize, alignment: Alignment, is_last: bool) {
    let free = columns.saturating_sub(width(&text));
    let before = match alignment {
        Alignment::Right => free,
        Alignment::Center => free / 2,
        Alignment::Left | Alignment::None => 0,
    };
    line.push(Span::plain(&" ".repeat(before)));
    line.extend(text);
    if !is_last {
        line.push(Span::plain(&" ".repeat(free - before)));
    }
}
