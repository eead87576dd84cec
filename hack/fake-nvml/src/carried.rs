//! A node's description that a program carries behind its own bytes: for where nothing else of the node can be seen,
//! as in a container. Works on bytes; opens only the file that it is asked to read.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::Path;

/// The last bytes of a program that carries a description. Before them stands its length, and before that the text.
const MARK: &[u8; 8] = b"fakenvml";
const TRAILER: u64 = 16;
/// No description is longer, in bytes.
const LONGEST: u64 = 1 << 20;

/// The program with this description, in place of one that it carries already.
pub fn with(mut program: Vec<u8>, text: &str) -> Vec<u8> {
    if let Some(length) = length(&program[program.len().saturating_sub(TRAILER as usize)..]) {
        let rest = (program.len() as u64).checked_sub(TRAILER).and_then(|rest| rest.checked_sub(length));
        program.truncate(rest.map_or(usize::MAX, |rest| rest as usize));
    }
    program.extend_from_slice(text.as_bytes());
    program.extend_from_slice(&(text.len() as u64).to_le_bytes());
    program.extend_from_slice(MARK);
    program
}

/// What the program carries, if anything.
pub fn read(program: &Path) -> Option<String> {
    from(program).ok().flatten()
}

fn from(program: &Path) -> io::Result<Option<String>> {
    let mut file = File::open(program)?;
    let Some(start) = file.metadata()?.len().checked_sub(TRAILER) else { return Ok(None) };
    file.seek(SeekFrom::Start(start))?;
    let mut trailer = [0; TRAILER as usize];
    file.read_exact(&mut trailer)?;
    let Some(length) = length(&trailer).filter(|length| *length <= LONGEST.min(start)) else {
        return Ok(None);
    };
    file.seek(SeekFrom::Start(start - length))?;
    let mut text = String::new();
    file.take(length).read_to_string(&mut text)?;
    Ok(Some(text))
}

fn length(trailer: &[u8]) -> Option<u64> {
    let (length, mark) = trailer.split_first_chunk::<8>()?;
    (mark == MARK).then(|| u64::from_le_bytes(*length))
}
