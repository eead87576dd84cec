//! Links between the pages (*.md). Each names a file of the tree and, behind a `#`, a heading of that page; each page of
//! docs/ is linked from README.md, or from a page that README.md links to. Links to other sites are not tried.
//! Reads text only.

use std::collections::{BTreeMap, BTreeSet};

use crate::rules::Finding;

/// Where readers start.
const START: &str = "README.md";
/// Pages that must be reached from there.
const REACHED: &str = "docs/";

#[derive(Debug, PartialEq, Eq)]
struct Link {
    line: usize,
    target: String,
}

/// Everything that is wrong with the links of `pages`, which are the texts of all pages by their paths. `files` are the
/// paths of all files. Paths are relative to the top of the tree.
pub fn check(pages: &BTreeMap<String, String>, files: &BTreeSet<String>) -> Vec<Finding> {
    let mut found = Vec::new();
    for (page, text) in pages {
        for Link { line, target } in links(text) {
            if let Some(words) = problem(page, &target, pages, files) {
                found.push(Finding { path: page.clone(), line, rule: "links", words });
            }
        }
    }
    found.extend(unreached(pages));
    found
}

fn problem(
    page: &str,
    target: &str,
    pages: &BTreeMap<String, String>,
    files: &BTreeSet<String>,
) -> Option<String> {
    if is_elsewhere(target) {
        return None;
    }
    let (file, anchor) = parts(target);
    let Some(file) = resolved(page, file) else {
        return Some(format!("{target} leads out of the tree; link to something in it"));
    };
    if !exists(&file, files) {
        return Some(format!("{target}: there is no {file}; correct the path, or remove the link"));
    }
    let (text, anchor) = (pages.get(&file)?, anchor?);
    let slugs = slugs(text);
    (!slugs.contains(anchor)).then(|| {
        let known: Vec<&str> = slugs.iter().map(String::as_str).collect();
        format!("{target}: {file} has no heading #{anchor}; it has {}", known.join(", "))
    })
}

fn unreached(pages: &BTreeMap<String, String>) -> Vec<Finding> {
    let linked = |page: &String| -> BTreeSet<String> {
        let text = pages.get(page).map(String::as_str).unwrap_or_default();
        let targets = links(text).into_iter().filter(|link| !is_elsewhere(&link.target));
        targets.filter_map(|link| resolved(page, parts(&link.target).0)).collect()
    };
    let near = linked(&START.to_owned());
    let far: BTreeSet<String> = near.iter().flat_map(linked).collect();
    let missed = |page: &&String| page.starts_with(REACHED) && !near.contains(*page) && !far.contains(*page);
    let words = format!("nobody finds this page: link to it from {START}, or from a page that it links to");
    let finding =
        |page: &String| Finding { path: page.clone(), line: 1, rule: "links", words: words.clone() };
    pages.keys().filter(missed).map(finding).collect()
}

fn is_elsewhere(target: &str) -> bool {
    target.contains("://") || target.starts_with("//") || target.starts_with("mailto:")
}

/// The file and the anchor of a target.
fn parts(target: &str) -> (&str, Option<&str>) {
    target.split_once('#').map_or((target, None), |(file, anchor)| (file, Some(anchor)))
}

/// The path of a target that stands on a page. None: it leads out of the tree.
fn resolved(page: &str, file: &str) -> Option<String> {
    if file.is_empty() {
        return Some(page.to_owned());
    }
    let folder = page.rsplit_once('/').map_or("", |(folder, _)| folder);
    let start = if file.starts_with('/') { "" } else { folder };
    let mut path: Vec<&str> = Vec::new();
    for part in start.split('/').chain(file.split('/')) {
        match part {
            "" | "." => {}
            ".." => _ = path.pop()?,
            part => path.push(part),
        }
    }
    Some(path.join("/"))
}

/// A file, or a folder with a file in it.
fn exists(path: &str, files: &BTreeSet<String>) -> bool {
    let folder = format!("{path}/");
    path.is_empty()
        || files.contains(path)
        || files.range(folder.clone()..).next().is_some_and(|file| file.starts_with(&folder))
}

/// `[text](target)`, with or without a title, and `[name]: target`.
fn links(text: &str) -> Vec<Link> {
    let mut found = Vec::new();
    for (line, text) in prose(text) {
        let text = without_code(text);
        let mut add = |rest: &str| {
            let target = rest.split_whitespace().next().unwrap_or_default();
            let target = target.trim_start_matches('<').trim_end_matches('>').to_owned();
            found.push(Link { line, target });
        };
        for (at, joint) in text.match_indices("](") {
            let rest = &text[at + joint.len()..];
            add(&rest[..close(rest)]);
        }
        if let Some((_, rest)) = text.trim_start().strip_prefix('[').and_then(|rest| rest.split_once("]:")) {
            add(rest);
        }
    }
    found
}

/// Where the parenthesis is closed that was opened before `rest`.
fn close(rest: &str) -> usize {
    let mut depth = 0usize;
    for (at, letter) in rest.char_indices() {
        match letter {
            '(' => depth += 1,
            ')' if depth == 0 => return at,
            ')' => depth -= 1,
            _ => {}
        }
    }
    rest.len()
}

/// The lines outside fenced code, numbered from 1.
fn prose(text: &str) -> Vec<(usize, &str)> {
    let mut fence: Option<(char, usize)> = None;
    let mut found = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let start = line.trim_start();
        let mark = start.chars().next().filter(|mark| matches!(mark, '`' | '~'));
        let length = start.chars().take_while(|letter| Some(*letter) == mark).count();
        let rest = &start[length..];
        match (fence, mark) {
            (None, Some(mark)) if length >= 3 && !rest.contains('`') => fence = Some((mark, length)),
            (None, _) => found.push((at + 1, line)),
            (Some((open, least)), Some(mark))
                if mark == open && length >= least && rest.trim().is_empty() =>
            {
                fence = None;
            }
            (Some(_), _) => {}
        }
    }
    found
}

/// The line with the insides of its code spans blanked: nothing in them is a link.
fn without_code(line: &str) -> String {
    let (mut out, mut rest) = (String::new(), line);
    while let Some(open) = rest.find('`') {
        let ticks = run(&rest[open..]);
        let (before, after) = rest.split_at(open + ticks);
        out.push_str(before);
        rest = after;
        if let Some(close) = end_of_span(after, ticks) {
            out.push_str(&" ".repeat(close));
            out.push_str(&after[close..close + ticks]);
            rest = &after[close + ticks..];
        }
    }
    out + rest
}

/// How many backticks it begins with.
fn run(text: &str) -> usize {
    text.bytes().take_while(|byte| *byte == b'`').count()
}

/// Where a run of exactly so many backticks is.
fn end_of_span(text: &str, ticks: usize) -> Option<usize> {
    let mut at = 0;
    while let Some(found) = text[at..].find('`') {
        let length = run(&text[at + found..]);
        if length == ticks {
            return Some(at + found);
        }
        at += found + length;
    }
    None
}

/// The anchors of a page. Of headings with the same slug, GitHub numbers the second and later ones.
fn slugs(text: &str) -> BTreeSet<String> {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let mut found = BTreeSet::new();
    for (_, line) in prose(text) {
        let Some(heading) = heading(line) else { continue };
        let slug = slug(heading);
        let count = seen.entry(slug.clone()).or_default();
        found.insert(if *count == 0 { slug } else { format!("{slug}-{count}") });
        *count += 1;
    }
    found
}

/// The text of a heading: `## Text`.
fn heading(line: &str) -> Option<&str> {
    let start = line.trim_start_matches(' ');
    let level = start.bytes().take_while(|byte| *byte == b'#').count();
    let text = start[level..].strip_prefix(' ')?;
    (line.len() - start.len() < 4 && (1..=6).contains(&level)).then(|| text.trim())
}

/// As GitHub makes it of what is shown: in lower case, letters, digits, `_` and `-` kept, `-` for spaces.
fn slug(heading: &str) -> String {
    let kept = |letter: char| match letter {
        ' ' => Some('-'),
        letter => (letter.is_alphanumeric() || matches!(letter, '-' | '_')).then_some(letter),
    };
    shown(heading).trim().to_lowercase().chars().filter_map(kept).collect()
}

/// A heading without the targets of its links.
fn shown(heading: &str) -> String {
    let (mut out, mut rest) = (String::new(), heading);
    while let Some(at) = rest.find("](") {
        let target = &rest[at + 2..];
        out.push_str(&rest[..at]);
        rest = target.get(close(target) + 1..).unwrap_or_default();
    }
    out + rest
}

#[test]
fn slugs_are_githubs() {
    for (heading, expected) in [
        ("Install", "install"),
        ("What waits for long", "what-waits-for-long"),
        ("`tranche top`: who has what?", "tranche-top-who-has-what"),
        ("KAI's annotations", "kais-annotations"),
        ("Rung `mps`, and what it does not hold against", "rung-mps-and-what-it-does-not-hold-against"),
        ("1.34 and 1.35", "134-and-135"),
        ("Ports - and more", "ports---and-more"),
        ("max_processes", "max_processes"),
        ("See [the page](docs/a.md#b) there", "see-the-page-there"),
        ("Größe", "größe"),
    ] {
        assert_eq!(slug(heading), expected, "{heading}");
    }
    let page = "# One\n## Two\n```\n# not\n```\n### Two\n#none\n####### seven\n    # code\n## Two\n";
    let expected = ["one", "two", "two-1", "two-2"].map(str::to_owned);
    assert_eq!(slugs(page), BTreeSet::from(expected));
}

#[test]
fn links_are_found_where_a_reader_sees_them() {
    let targets = |text: &str| -> Vec<String> { links(text).into_iter().map(|link| link.target).collect() };
    for (text, expected) in [
        ("see [a](b.md) and [c](d.md#e \"title\"), ![f](g.png)", &["b.md", "d.md#e", "g.png"][..]),
        ("[`code`](a.md)", &["a.md"]),
        ("| row | [a](<b.md>) |", &["b.md"]),
        ("[a](b_(c).md)", &["b_(c).md"]),
        ("[name]: target.md", &["target.md"]),
        ("`[a](b.md)` and ``[`a`](b.md)``", &[]),
        ("a lone ` and [a](b.md)", &["b.md"]),
        ("```text\n[a](b.md)\n```\n[c](d.md)", &["d.md"]),
        ("~~~~\n~~~\n[a](b.md)\n~~~~", &[]),
        ("[a][b], [c] (d)", &[]),
    ] {
        assert_eq!(targets(text), expected, "{text}");
    }
    assert_eq!(links("one\n\n[a](b)"), [Link { line: 3, target: "b".to_owned() }]);
}

#[test]
fn a_link_to_nothing_is_found_and_so_is_a_page_that_nobody_links_to() {
    let page = |path: &str, text: &str| (path.to_owned(), text.to_owned());
    let pages = BTreeMap::from([
        page(
            "README.md",
            "# Top\n[a](docs/a.md#one), [out](https://example.com/x#y), [f](deploy/), [m](Makefile)",
        ),
        page("docs/a.md", "# One\n[up](../README.md#top), [here](#one), [b](b.md), [top](/README.md)"),
        page("docs/b.md", "[c](c.md)"),
        page("docs/c.md", ""),
    ]);
    let files = ["README.md", "docs/a.md", "docs/b.md", "docs/c.md", "deploy/x.yaml", "Makefile"];
    let files: BTreeSet<String> = files.map(str::to_owned).into();
    let found = check(&pages, &files);
    let lines: Vec<_> = found.iter().map(|one| (one.path.as_str(), one.words.as_str())).collect();
    assert!(matches!(lines[..], [("docs/c.md", words)] if words.contains("nobody finds")), "{lines:?}");
    for (bad, word) in [
        ("[x](none.md)", "there is no docs/none.md"),
        ("[x](../none/)", "there is no none;"),
        ("[x](../../a.md)", "leads out"),
        ("[x](#two)", "no heading #two"),
        ("[x](../README.md#Top)", "no heading #Top"),
        ("[x](../README.md#)", "no heading #"),
    ] {
        let mut pages = pages.clone();
        pages.insert("docs/c.md".to_owned(), bad.to_owned());
        let found = check(&pages, &files);
        let told = |one: &Finding| one.path == "docs/c.md" && one.line == 1 && one.words.contains(word);
        assert!(found.iter().any(told), "{bad}: {found:?}");
    }
}
