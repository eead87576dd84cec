//! Tables as kubectl prints them: upper-case headers, aligned columns, no borders, never wrapped.

use comfy_table::{Table, presets};

/// What a cell says that has nothing to say.
pub const NONE: &str = "<none>";
/// Between two columns.
const GAP: u16 = 3;

/// Lines that end with a newline each, without trailing blanks; the header alone without rows.
pub fn render<R>(header: &[&str], rows: R) -> String
where
    R: IntoIterator,
    R::Item: IntoIterator<Item = String>,
{
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header.iter().copied());
    for row in rows {
        // A line break in a cell would look like another row.
        table.add_row(row.into_iter().map(|cell| plain(&cell.replace('\n', " "))));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, GAP));
    }
    table.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

/// Words for a terminal. They may be a tenant's: no character of theirs moves the cursor, begins a line, or turns the
/// direction in which the rest is read (the embeddings, overrides and isolates of Unicode Annex 9).
pub fn plain(words: &str) -> String {
    let turns = |c: char| matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    words.replace(|c: char| c.is_control() || turns(c), "\u{fffd}")
}

/// `<none>` for nothing.
pub fn or_none(text: Option<impl Into<String>>) -> String {
    text.map(Into::into).filter(|text| !text.is_empty()).unwrap_or_else(|| NONE.to_owned())
}

/// Words joined by commas, `<none>` for no word.
pub fn listed<T: AsRef<str>>(words: &[T]) -> String {
    or_none(Some(words.iter().map(AsRef::as_ref).collect::<Vec<&str>>().join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_without_borders_or_trailing_blanks() {
        let row = |cells: [&str; 2]| cells.map(str::to_owned);
        let text = render(&["DEVICE", "PRODUCT"], [row(["gpu-0", "NVIDIA T4"]), row(["gpu-10", "a\nb"])]);
        assert_eq!(text, "DEVICE   PRODUCT\ngpu-0    NVIDIA T4\ngpu-10   a b\n");
    }

    /// Names of gangs are annotations, which say anything.
    #[test]
    fn no_words_of_a_tenant_move_the_cursor_or_turn_the_line() {
        let text = render(
            &["KEPT FOR", "GPUS"],
            [["a/gang \u{1b}[2J\r\u{9b}1A\u{202e}x", "gpu-0"].map(str::to_owned)],
        );
        assert_eq!(text.lines().count(), 2, "{text:?}");
        let moves = |c: char| c != '\n' && c.is_control() || c == '\u{202e}';
        assert!(!text.contains(moves) && text.contains("[2J") && text.contains("gpu-0"), "{text:?}");
    }

    #[test]
    fn without_rows_there_is_the_header() {
        assert_eq!(render(&["STEP", "DOES"], Vec::<Vec<String>>::new()), "STEP   DOES\n");
        assert_eq!((listed::<&str>(&[]), listed(&["a", "b"])), (NONE.to_owned(), "a, b".to_owned()));
    }
}
