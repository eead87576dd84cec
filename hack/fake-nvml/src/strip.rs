//! Taking exported names away from a copy of the library, so that `dlsym` truly
//! fails, as with a driver that is older than the function. Works on bytes.
//!
//! The entry of the dynamic symbol table becomes that of a symbol which the
//! library neither has nor needs (weak, undefined). The hash table still leads to
//! it, and no loader takes an undefined symbol for a definition.

use std::collections::BTreeSet;

const SHT_DYNSYM: u32 = 11;
const SYMBOL_SIZE: u64 = 24;
/// What stands behind the name in an entry that is weak, undefined and of no type: info, visibility, section, value, size.
const UNDEFINED: [u8; 20] = {
    let mut bytes = [0; 20];
    bytes[0] = 2 << 4;
    bytes
};

/// A part of the file, or words about why there is none.
fn part(file: &[u8], at: u64, length: u64) -> Result<&[u8], String> {
    let end = at.checked_add(length).ok_or("a length beyond all files")?;
    let range =
        usize::try_from(at).map_err(|e| e.to_string())?..usize::try_from(end).map_err(|e| e.to_string())?;
    file.get(range).ok_or_else(|| format!("not a whole ELF file: nothing at {at}"))
}

fn word(file: &[u8], at: u64) -> Result<u64, String> {
    Ok(u64::from_le_bytes(part(file, at, 8)?.try_into().map_err(|_| "short")?))
}

fn half(file: &[u8], at: u64) -> Result<u32, String> {
    Ok(u32::from_le_bytes(part(file, at, 4)?.try_into().map_err(|_| "short")?))
}

fn short(file: &[u8], at: u64) -> Result<u16, String> {
    Ok(u16::from_le_bytes(part(file, at, 2)?.try_into().map_err(|_| "short")?))
}

struct Section {
    kind: u32,
    offset: u64,
    size: u64,
    link: u32,
}

fn section(file: &[u8], number: u64) -> Result<Section, String> {
    let at = word(file, 0x28)?.saturating_add(number.saturating_mul(u64::from(short(file, 0x3A)?)));
    Ok(Section {
        kind: half(file, at.saturating_add(4))?,
        offset: word(file, at.saturating_add(0x18))?,
        size: word(file, at.saturating_add(0x20))?,
        link: half(file, at.saturating_add(0x28))?,
    })
}

/// The exported names, and where in the file the entry of each begins.
fn exported(file: &[u8]) -> Result<Vec<(String, u64)>, String> {
    if part(file, 0, 6)? != b"\x7FELF\x02\x01" {
        return Err("not a 64-bit little-endian ELF file".to_owned());
    }
    let count = u64::from(short(file, 0x3C)?);
    let mut symbols = None;
    for number in 0..count {
        let section = section(file, number)?;
        if section.kind == SHT_DYNSYM {
            symbols = Some(section);
        }
    }
    let symbols = symbols.ok_or("no dynamic symbols")?;
    let strings = section(file, u64::from(symbols.link))?;
    let mut names = Vec::new();
    for number in 0..symbols.size / SYMBOL_SIZE {
        let at = symbols.offset.saturating_add(number * SYMBOL_SIZE);
        // Section 0 means that the symbol is wanted, not offered.
        if short(file, at.saturating_add(6))? == 0 {
            continue;
        }
        let start = strings.offset.saturating_add(u64::from(half(file, at)?));
        let rest = part(file, start, strings.offset.saturating_add(strings.size).saturating_sub(start))?;
        let end = rest.iter().position(|b| *b == 0).unwrap_or(rest.len());
        names.push((String::from_utf8_lossy(rest.get(..end).unwrap_or_default()).into_owned(), at));
    }
    Ok(names)
}

/// The exported names of a library.
pub fn names(file: &[u8]) -> Result<BTreeSet<String>, String> {
    Ok(exported(file)?.into_iter().map(|(name, _)| name).collect())
}

/// Takes names away. A name that is not there is an error.
pub fn strip(file: &mut [u8], unwanted: &[String]) -> Result<(), String> {
    let there = exported(file)?;
    for name in unwanted {
        let found = there.iter().find(|(n, _)| n == name);
        let (_, at) = found.ok_or_else(|| format!("{name} is not exported"))?;
        let entry = usize::try_from(*at).ok().and_then(|at| file.get_mut(at..)).ok_or("out of the file")?;
        entry.get_mut(4..SYMBOL_SIZE as usize).ok_or("out of the file")?.copy_from_slice(&UNDEFINED);
    }
    Ok(())
}
