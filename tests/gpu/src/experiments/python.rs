//! E7, and E28's matrix products: PyTorch, where it is installed.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{mib, part};
use crate::limits::{usable, within};
use crate::program;
use crate::stage::Stage;
use crate::table::{Finding, Verdict};
use crate::tenant::without_cuda;

const LIMIT: Duration = Duration::from_secs(180);

/// One JSON line: bytes held, the error's name, what torch was told of memory, and whether it goes on.
/// The argument: bytes at which it gives up.
const TENSORS: &str = r#"
import json, sys, torch
most = int(sys.argv[1])
free, total = torch.cuda.mem_get_info()
held, error = [], ""
try:
    while len(held) << 26 < most:
        held.append(torch.empty(1 << 26, dtype=torch.uint8, device="cuda").fill_(1))
except RuntimeError as refused:
    error = type(refused).__name__
bytes_held = len(held) << 26
held.clear()
torch.cuda.empty_cache()
lives = int(torch.ones(1024, device="cuda").sum().item()) == 1024
print(json.dumps({"bytes": bytes_held, "error": error, "free": free, "total": total, "lives": lives}))
"#;

/// One JSON line: tera-operations a second of a square matrix product in bf16.
const PRODUCTS: &str = r#"
import json, time, torch
size, rounds = 4096, 50
a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
b = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
for _ in range(10):
    a @ b
torch.cuda.synchronize()
begin = time.perf_counter()
for _ in range(rounds):
    a @ b
torch.cuda.synchronize()
seconds = time.perf_counter() - begin
print(json.dumps({"tflops": 2 * size**3 * rounds / seconds / 1e12}))
"#;

/// E7
pub fn tensors(stage: &mut Stage) -> Result<Vec<Finding>> {
    if let Err(why) = torch() {
        return Ok(vec![Finding::not_run("", why)]);
    }
    stage.serve(stage.limits)?;
    let ways = [
        ("caching allocator", None),
        ("expandable segments", Some(("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"))),
        ("no caching", Some(("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"))),
    ];
    ways.into_iter().map(|(name, variable)| part(name, tensors_by(stage, name, variable))).collect()
}

fn tensors_by(stage: &Stage, part: &str, variable: Option<(&str, &str)>) -> Result<Finding> {
    let share = stage.memory();
    let mut env = stage.env(stage.limits);
    env.extend(variable.map(|(name, value)| (name.to_owned(), value.to_owned())));
    let seen = python(TENSORS, &[&stage.beyond(share).to_string()], &env)?;
    let number = |name: &str| seen[name].as_u64().unwrap_or(0);
    let (error, lives) = (seen["error"].as_str().unwrap_or(""), seen["lives"] == json!(true));
    let observed = format!(
        "{} of tensors; {}; {}; torch was told {} free of {}",
        mib(number("bytes")),
        if error.is_empty() { "no refusal" } else { error },
        if lives { "goes on" } else { "does not go on" },
        mib(number("free")),
        mib(number("total")),
    );
    let verdict = match within(number("bytes"), share) {
        false => Verdict::Leaks,
        true => {
            Verdict::as_expected_if(error == "OutOfMemoryError" && lives && usable(number("bytes"), share))
        }
    };
    Ok(Finding::new(part, format!("≤ {share} MiB, OutOfMemoryError, goes on"), observed, verdict).with(seen))
}

/// Tera-operations a second.
pub fn products(env: &[(String, String)]) -> Result<f64> {
    let seen = python(PRODUCTS, &[], env)?;
    seen["tflops"].as_f64().context("a number of operations")
}

/// Why there is no PyTorch, if there is none.
pub fn torch() -> Result<(), String> {
    let mut command = Command::new("python3");
    command.args(["-c", "import torch"]);
    match program::run_until_stopped(command, "", LIMIT) {
        Ok(output) if output.success => Ok(()),
        Ok(output) => {
            let last = output.text.lines().last().unwrap_or("no words").to_owned();
            Err(format!("python3 has no torch: {last}"))
        }
        Err(error) => Err(format!("no python3: {error:#}")),
    }
}

fn python(text: &str, arguments: &[&str], env: &[(String, String)]) -> Result<Value> {
    let mut command = Command::new("python3");
    command.args(["-c", text]).args(arguments);
    without_cuda(&mut command).envs(env.iter().map(|(name, value)| (name, value)));
    let output = program::run_until_stopped(command, "", LIMIT)?;
    let answer = output.text.lines().find(|line| line.starts_with('{'));
    let answer = answer.with_context(|| output.text.lines().last().unwrap_or("no answer").to_owned())?;
    serde_json::from_str(answer).context("the answer of python3")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where there is a python3, it understands both programs.
    #[test]
    fn the_programs_are_python() {
        for text in [TENSORS, PRODUCTS] {
            let check = format!("compile({text:?}, 'program', 'exec')");
            let mut command = Command::new("python3");
            command.args(["-c", &check]);
            match program::run_until(command, "", LIMIT) {
                Ok(output) => assert!(output.success, "{}", output.text),
                Err(error) => eprintln!("not checked: {error:#}"),
            }
        }
    }
}
