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
        table.add_row(row.into_iter().map(|cell| cell.replace('\n', " ")));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, GAP));
    }
    table.lines().map(|line| format!("{}\n", line.trim_end())).collect()
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

    #[test]
    fn without_rows_there_is_the_header() {
        assert_eq!(render(&["STEP", "DOES"], Vec::<Vec<String>>::new()), "STEP   DOES\n");
        assert_eq!((listed::<&str>(&[]), listed(&["a", "b"])), (NONE.to_owned(), "a, b".to_owned()));
    }
}
