//! Names the library as the real one is named, and makes a stub of every
//! exported name in `names.txt` that no file under `src/api` implements.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
    // A thread may still hold something of the library when a client closes it.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rerun-if-changed=names.txt");
    println!("cargo:rerun-if-changed=src/api");

    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets it"));
    let names = names(&root.join("names.txt"));
    let done = implemented(&root.join("src/api"));

    let unknown: Vec<_> = done.iter().filter(|d| !names.iter().any(|(n, _)| n == *d)).collect();
    assert!(unknown.is_empty(), "not in names.txt: {unknown:?}");

    let mut table = String::from("pub static NAMES: &[(&str, u32)] = &[\n");
    let mut stubs = String::new();
    let mut check = String::new();
    for (name, since) in &names {
        let _ = writeln!(table, "    (\"{name}\", {since}),");
        if !done.contains(name) {
            let _ = writeln!(
                stubs,
                "#[unsafe(no_mangle)]\npub extern \"C\" fn {name}() -> nvmlReturn_t {{ crate::call::stub(\"{name}\") }}"
            );
        } else if *since <= 580 {
            let _ = writeln!(check, "    lib.{name} = Ok({name});");
        }
    }
    table.push_str("];\n");
    write(&out.join("names.rs"), &table);
    write(&out.join("stubs.rs"), &stubs);
    write(&out.join("signatures.rs"), &format!("{{\n{check}}}\n"));
}

/// The name list: `name series` per line.
fn names(path: &Path) -> Vec<(String, u32)> {
    let text = fs::read_to_string(path).expect("names.txt is readable");
    text.lines()
        .filter(|l| !l.starts_with('#') && !l.trim().is_empty())
        .map(|l| {
            let (name, since) = l.split_once(' ').expect("name and series");
            (name.to_owned(), since.trim().parse().expect("a number"))
        })
        .collect()
}

/// Names that a file under `dir` declares as `fn nvmlSomething(`.
fn implemented(dir: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(dir).expect("src/api is readable") {
        let path = entry.expect("an entry").path();
        let text = fs::read_to_string(&path).expect("a source file");
        for line in text.lines() {
            if let Some((_, rest)) = line.split_once("fn nvml").filter(|(before, _)| !before.contains("//")) {
                let end = rest.find('(').unwrap_or(rest.len());
                found.insert(format!("nvml{}", &rest[..end]));
            }
        }
    }
    found
}

fn write(path: &Path, text: &str) {
    fs::write(path, text).expect("OUT_DIR is writable");
}
