//! Files of lines with fields between commas, whose first line names the columns.

use std::rc::Rc;
use std::str::FromStr;

use thiserror::Error;

/// What is wrong with a file, and where.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BadTrace {
    #[error("{file} is empty; its first line names the columns")]
    Empty { file: String },
    #[error("{file}, line 1: column {column} is missing; there are: {found}")]
    Column { file: String, column: &'static str, found: String },
    #[error("{file}, line {line}: {found} fields where the first line names {expected}")]
    Fields { file: String, line: usize, found: usize, expected: usize },
    #[error("{file}, line {line}, field {column}: {words}")]
    Field { file: String, line: usize, column: &'static str, words: String },
}

/// One line, with the columns that were asked for.
pub(super) struct Row<'a, const N: usize> {
    file: &'a str,
    line: usize,
    columns: [&'static str; N],
    pub fields: [&'a str; N],
    names: Rc<[&'a str]>,
    all: Vec<&'a str>,
}

impl<const N: usize> Row<'_, N> {
    /// What is wrong with the field in the column of this number.
    pub fn bad(&self, column: usize, words: String) -> BadTrace {
        self.bad_at(self.columns[column], words)
    }

    /// The same by the column's name.
    pub fn bad_at(&self, column: &'static str, words: String) -> BadTrace {
        BadTrace::Field { file: self.file.to_owned(), line: self.line, column, words }
    }

    pub fn text(&self, column: usize) -> Result<&str, BadTrace> {
        let text = self.fields[column];
        if text.is_empty() { Err(self.bad(column, "is empty".to_owned())) } else { Ok(text) }
    }

    pub fn number<T: FromStr>(&self, column: usize) -> Result<T, BadTrace> {
        let text = self.fields[column];
        text.parse().map_err(|_| self.bad(column, format!("{text:?} is not a valid whole number")))
    }

    /// A column that files may lack: what is in it, if anything is.
    pub fn optional(&self, column: &str) -> Option<&str> {
        let at = self.names.iter().position(|name| *name == column)?;
        self.all.get(at).copied().filter(|text| !text.is_empty())
    }

    /// The same as a value; `expected` says what it is, for the words about another.
    pub fn optional_as<T: FromStr>(
        &self,
        column: &'static str,
        expected: &str,
    ) -> Result<Option<T>, BadTrace> {
        let Some(text) = self.optional(column) else { return Ok(None) };
        let value = text.parse().map(Some);
        value.map_err(|_| self.bad_at(column, format!("{text:?} is not {expected}")))
    }
}

fn header<'a>(file: &str, text: &'a str) -> Result<Vec<&'a str>, BadTrace> {
    let line = text.trim_start_matches('\u{feff}').lines().next().filter(|line| !line.trim().is_empty());
    let line = line.ok_or_else(|| BadTrace::Empty { file: file.to_owned() })?;
    Ok(line.split(',').map(str::trim).collect())
}

/// The lines below the first, each with what it has of these columns.
///
/// # Errors
/// A column is missing, or a line has more or fewer fields than the first.
pub(super) fn rows<'a, const N: usize>(
    file: &'a str,
    text: &'a str,
    columns: [&'static str; N],
) -> Result<Vec<Row<'a, N>>, BadTrace> {
    let header: Rc<[&str]> = header(file, text)?.into();
    let mut places = [0; N];
    for (place, column) in places.iter_mut().zip(columns) {
        let found = header.iter().position(|name| *name == column);
        *place = found.ok_or_else(|| BadTrace::Column {
            file: file.to_owned(),
            column,
            found: header.join(", "),
        })?;
    }
    let mut rows = Vec::new();
    for (nth, line) in text.lines().enumerate().skip(1).filter(|(_, line)| !line.trim().is_empty()) {
        let all: Vec<&str> = line.split(',').map(str::trim).collect();
        let (found, expected, line) = (all.len(), header.len(), nth + 1);
        if found != expected {
            return Err(BadTrace::Fields { file: file.to_owned(), line, found, expected });
        }
        rows.push(Row {
            file,
            line,
            columns,
            fields: places.map(|at| all[at]),
            names: Rc::clone(&header),
            all,
        });
    }
    Ok(rows)
}
