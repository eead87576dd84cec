//! Each rule fires on a bad snippet and leaves the good one alone.

use crate::lexer;
use crate::rules::{Source, check, edges, test_files, unused, words};

/// The rules that fire on a file.
fn fired(path: &str, text: &str) -> Vec<&'static str> {
    let only_for_tests = path.starts_with("tests/");
    let source = Source { path: path.to_owned(), text: text.to_owned(), only_for_tests };
    check(&source).into_iter().map(|finding| finding.rule).collect()
}

#[test]
fn imports_of_other_modules_are_found() {
    for (path, bad) in [
        ("src/model/gpu.rs", "use crate::params::Params;"),
        ("src/slices/diff.rs", "use crate::{model::gpu, cdi::Spec};"),
        ("src/cluster/read.rs", "fn f() -> crate::slices::Wanted { todo() }"),
        ("src/kubelet/dra.rs", "use crate::ops::tasks;"),
        ("src/ops/server.rs", "use crate::node::Node;"),
        ("src/cdi/render.rs", "use super::super::ledger::Record;"),
        ("src/cdi/mod.rs", "//! May import: model.\nuse super::ledger::Record;"),
    ] {
        assert_eq!(fired(path, bad), ["imports"], "{path}: {bad}");
    }
    for (path, good) in [
        ("src/slices/diff.rs", "use crate::{model::{gpu, names::DRIVER}, slices::Wanted};"),
        ("src/cdi/render.rs", "use super::Spec;"),
        ("src/node/preparer.rs", "use crate::{ops::tasks, prepare, nvml};"),
        ("src/model/gpu.rs", "// use crate::params::Params;\nconst A: &str = \"crate::params::\";"),
        ("src/model/gpu.rs", "#[cfg(test)]\nmod tests {\n    use crate::params::Params;\n}"),
    ] {
        assert_eq!(fired(path, good), [""; 0], "{path}: {good}");
    }
}

#[test]
fn crates_and_effects_are_named_only_where_they_belong() {
    for (path, bad) in [
        ("src/model/gpu.rs", "use std::{fmt, fs::File};"),
        ("src/prepare/plan.rs", "async fn f() { tokio::time::timeout(a, b).await; }"),
        ("src/ledger/codec.rs", "use rand::*;"),
        ("src/cdi/render.rs", "use std::fs;"),
        ("src/cdi/render.rs", "use nix::unistd::getuid;"),
        ("src/node/health.rs", "use nvml_wrapper::Nvml;"),
        ("src/cluster/read.rs", "use tonic::Status;"),
        ("src/node/publisher.rs", "use kube::Api;"),
        ("src/params/decode.rs", "use k8s_openapi::api::resource::v1::ResourceClaim;"),
        ("src/kubelet/health.rs", "use nix::sys::stat;"),
        ("src/main.rs", "use axum::Router;"),
        ("src/node/health.rs", "fn f() { std::env::var(x); }"),
    ] {
        assert_eq!(fired(path, bad), ["outside"], "{path}: {bad}");
    }
    for (path, good) in [
        ("src/slices/content.rs", "use k8s_openapi::api::resource::v1::ResourceSlice;"),
        ("src/host/durable.rs", "use nix::fcntl; use std::fs;"),
        ("src/params/decode.rs", "fn f(tokio: u8) { self.kube.f(); my_tokio::f(); }"),
    ] {
        assert_eq!(fired(path, good), [""; 0], "{path}: {good}");
    }
}

#[test]
fn decisions_do_not_ask_for_the_time() {
    for bad in ["let now = std::time::Instant::now();", "let now = SystemTime::now();", "Timestamp::now()"] {
        assert_eq!(fired("src/inventory/fold.rs", &format!("fn f() {{ {bad} }}")), ["clock"], "{bad}");
        assert_eq!(fired("src/node/health.rs", &format!("fn f() {{ {bad} }}")), [""; 0], "{bad}");
    }
}

#[test]
fn modules_say_what_they_are() {
    assert_eq!(fired("src/cdi/mod.rs", "pub mod render;"), ["doc"]);
    assert_eq!(fired("src/cdi/mod.rs", "//! Writes CDI files.\npub mod render;"), ["doc"]);
    let says = |module: &str, list: &str| {
        fired(&format!("src/{module}/mod.rs"), &format!("//! Writes.\n//! May import{list}\npub mod render;"))
    };
    for (module, list) in [
        ("cdi", ": model."),
        ("cdi", " `model` only; May name: nix."),
        ("conditions", ": model, ledger (the record of params). May name: params."),
        ("model", ": nothing of ours."),
        ("cdi", ": everything below. May name: nix."),
        ("conditions", ": model,\n//! ledger.\n//! May name: nix."),
    ] {
        let expected: &[&str] = if list.contains("params)") { &["doc"] } else { &[] };
        assert_eq!(says(module, list), expected, "{module}{list}");
    }
    for (module, list) in [
        ("cdi", ": nothing of ours."),
        ("cdi", ": model, params."),
        ("conditions", ": model. May name: ledger."),
        ("conditions", ": everything below."),
        ("conditions", ": everything below but model."),
    ] {
        assert_eq!(says(module, list), ["doc"], "{module}{list}");
    }
    assert_eq!(fired("src/attic/mod.rs", "//! Old things. May import: model."), ["module"]);
}

#[test]
fn an_import_that_is_allowed_and_not_used_is_found() {
    let source = |path: &str, text: &str| Source {
        path: path.to_owned(),
        text: text.to_owned(),
        only_for_tests: path.starts_with("tests/"),
    };
    let text = "use crate::{model::gpu, ledger::{self, Record}};\nfn f() { crate::conditions::g() }\n\
                // crate::cdi\n#[cfg(test)]\nmod tests {\n    use crate::params::Params;\n}\n";
    let used = edges(&source("src/conditions/mod.rs", text));
    assert_eq!(used.iter().copied().collect::<Vec<_>>(), [("conditions", "ledger"), ("conditions", "model")]);
    assert!(edges(&source("tests/it/conditions.rs", text)).is_empty());
    assert!(edges(&source("src/main.rs", text)).is_empty());
    let words: Vec<String> = unused(&used).into_iter().map(|finding| finding.words).collect();
    assert!(!words.iter().any(|words| words.starts_with("conditions may")), "{words:?}");
    assert!(words.iter().any(|words| words.starts_with("cdi may import model and does not")), "{words:?}");
}

#[test]
fn files_have_budgets() {
    let long = |lines: usize| "const A: u8 = 1;\n".repeat(lines);
    assert_eq!(fired("src/cdi/render.rs", &long(601)), ["budget"]);
    assert_eq!(fired("src/cdi/render.rs", &long(600)), [""; 0]);
    let tested = format!("{}#[cfg(test)]\nmod tests {{\n{}}}\n", long(600), long(300));
    assert_eq!(fired("src/cdi/render.rs", &tested), [""; 0]);
}

#[test]
fn tests_do_not_sleep_but_may_wait() {
    for bad in ["std::thread::sleep(a);", "tokio::time::sleep(a).await;", "time::sleep(a).await;"] {
        assert_eq!(fired("tests/it/main.rs", &format!("fn works() {{ {bad} }}")), ["sleep"], "{bad}");
        let inline = format!("#[cfg(test)]\nmod tests {{\n    fn works() {{ {bad} }}\n}}\n");
        assert_eq!(fired("src/node/health.rs", &inline), ["sleep"], "{bad}");
        assert_eq!(fired("tests/it/main.rs", &format!("fn wait_for(a: u8) {{ {bad} }}")), [""; 0], "{bad}");
    }
    let imported = "use tokio::time::{Instant, sleep};\nasync fn the_one_who_waits() { sleep(a).await }";
    assert_eq!(fired("tests/it/main.rs", imported), ["sleep"]);
    assert_eq!(fired("tests/it/main.rs", "fn works() { rig.sleep(); sleep(); }"), [""; 0]);
    let paused =
        |sleep: &str| format!("#[tokio::test(start_paused = true)]\nasync fn works() {{ {sleep}(a); }}");
    assert_eq!(fired("tests/it/main.rs", &paused("tokio::time::sleep")), [""; 0]);
    assert_eq!(fired("tests/it/main.rs", &paused("std::thread::sleep")), ["sleep"]);
}

#[test]
fn machine_paths_are_found_in_any_text() {
    let bad = format!("a\nsource {}x\n", concat!("/wo", "rk/"));
    let found = words("hack/x.sh", &bad);
    assert_eq!((found.len(), found[0].line), (1, 2));
    assert!(words("hack/x.sh", "source ./work/x of the network/ and /homework").is_empty());
}

#[test]
fn files_for_tests_are_known_by_their_declaration() {
    let declared =
        "#[cfg(test)]\nmod tests;\n#[cfg(test)]\n#[path = \"diff_tests.rs\"]\npub(crate) mod more;\nmod x;";
    assert_eq!(
        test_files("src/slices/diff.rs", declared),
        ["src/slices/diff/tests.rs", "src/slices/diff_tests.rs"]
    );
    assert_eq!(test_files("src/slices/mod.rs", "    #[cfg(test)]\nmod tests;"), ["src/slices/tests.rs"]);
    assert!(test_files("src/slices/mod.rs", "#[cfg(test)]\nmod tests {\n").is_empty());
}

#[test]
fn only_code_is_read() {
    let text = "a /* x /* y */ tokio::z */ b // tokio::c\n\"tokio::\\\"d\" r#\"tokio::\"e\"# b'\\'' '\"' 'a: &'static f::g";
    let code = lexer::code(text);
    assert_eq!(code.len(), text.len());
    let paths: Vec<String> = lexer::paths(&code).into_iter().map(|named| named.path).collect();
    assert_eq!(paths, ["a", "b", "b", "a", "static", "f::g"]);
}

#[test]
fn groups_are_written_out_with_their_lines() {
    let paths = lexer::paths("use a::{\n    b::{c, d::*},\n    e,\n};\nf::g();");
    let flat: Vec<(usize, &str)> = paths.iter().map(|named| (named.line, named.path.as_str())).collect();
    assert_eq!(flat, [(1, "use"), (1, "a::b::c"), (1, "a::b::d::*"), (1, "a::e"), (5, "f::g")]);
}
