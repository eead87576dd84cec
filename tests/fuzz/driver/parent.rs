//! A process for each target, as many at once as there are processors; then a table in the words of cargo's tests.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use super::args::Args;
use super::child::UnderWay;
use super::{Target, checks, corpus, meter};

pub fn run(targets: &[Target], args: &Args) -> Result<bool, String> {
    let begin = Instant::now();
    let pending = corpus::pending().map_err(|error| error.to_string())?;
    let wanted: Vec<&Target> = targets.iter().filter(|target| args.wants(target.name)).collect();
    println!("\nrunning {} targets, {:?} each, seed {}", wanted.len(), args.time, args.seed);
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let checked = if args.names.is_empty() { check(args, &mut failed.lock().unwrap()) } else { 0 };
    let width = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let working = || {
            while let Some(target) = wanted.get(next.fetch_add(1, Relaxed)) {
                let (well, words) = one(target, args);
                println!(
                    "test {} ... {}",
                    target.name,
                    if well { format!("ok ({words})") } else { "FAILED".to_owned() }
                );
                if !well {
                    failed.lock().unwrap().push(format!("---- {}\n{words}", target.name));
                }
            }
        };
        (0..width).for_each(|_| drop(scope.spawn(working)));
    });
    let failed = failed.into_inner().unwrap();
    for words in &failed {
        println!("\n{words}");
    }
    let put_off = if args.pending { 0 } else { pending.len() };
    for (what, why) in pending.iter().filter(|_| !args.pending) {
        println!("SKIPPED: {what}: {why}");
    }
    println!(
        "\ntest result: {}. {} passed; {} failed; {put_off} ignored; 0 measured; {} filtered out; finished in {:.2?}",
        if failed.is_empty() { "ok" } else { "FAILED" },
        wanted.len() + checked - failed.len(),
        failed.len(),
        targets.len() - wanted.len(),
        begin.elapsed()
    );
    Ok(failed.is_empty())
}

/// Sees to it that what must fail does. How many there are.
fn check(args: &Args, failed: &mut Vec<String>) -> usize {
    let checks = checks::targets();
    for (target, expected) in &checks {
        let (well, words) = one(target, args);
        let seen = !well && words.contains(expected);
        println!("test {} ... {}", target.name, if seen { "ok" } else { "FAILED" });
        if !seen {
            failed.push(format!("---- {}\nit was to fail with {expected:?}\n{words}", target.name));
        }
    }
    checks.len()
}

/// True if all went well; what there is to say.
fn one(target: &Target, args: &Args) -> (bool, String) {
    let program = std::env::current_exe().expect("this program has a path");
    let mut command = Command::new(program);
    command.args(["--child", target.name, "--millis", &args.time.as_millis().to_string()]);
    command.args(["--seed", &args.seed.to_string()]);
    command.args(args.pending.then_some("--pending"));
    match command.output() {
        Ok(output) => match output.status.code() {
            Some(code) => (code == 0, said(&output)),
            None => (false, died(target, &output)),
        },
        Err(error) => (false, format!("it cannot be started: {error}")),
    }
}

fn said(Output { stdout, stderr, .. }: &Output) -> String {
    let text = [stdout, stderr].map(|bytes| String::from_utf8_lossy(bytes).trim().to_owned());
    text.iter().filter(|text| !text.is_empty()).cloned().collect::<Vec<_>>().join("\n")
}

/// An input has ended the whole process: its stack overflowed, its memory ran out, or it went on for ever.
fn died(target: &Target, output: &Output) -> String {
    let signal = output.status.signal().unwrap_or_default();
    let words = format!("it died of signal {signal}\n{}", said(output));
    let Some(input) = UnderWay::read(target.name) else { return words };
    let stored = corpus::store(target.name, "dies", &input);
    let stored = stored.map_or_else(|error| error.to_string(), |path| path.display().to_string());
    let text = String::from_utf8_lossy(&input).into_owned();
    format!("{words}\n    input: {stored}\n    {:?}", meter::shortened(&text))
}
