//! Commands that change the control file.

use std::fs;
use std::path::Path;

use fake_nvml::control::{
    Control, Event, EventKind, Fault, GpuControl, InstanceControl, MigControl, OneOrMany, Process,
};
use fake_nvml::node::Node;
use fake_nvml::state::{self, Lock, replace};

use crate::args::{Args, parse};

/// Events that are kept for event sets that have not asked yet.
const KEPT_EVENTS: usize = 64;

/// Reads, changes, checks and replaces the control file, one at a time.
pub fn edit(dir: &Path, command: &str, mut args: Args) -> Result<(), String> {
    let _lock = Lock::take(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let control = if command == "init" {
        let control = init(&mut args)?;
        match fs::remove_file(dir.join("state.json")) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(format!("state.json: {e}")),
            _ => {}
        }
        control
    } else {
        let mut control = read(dir)?;
        state::forget_overruled(dir, &control).map_err(|e| format!("state.json: {e}"))?;
        change(&mut control, command, &mut args)?;
        control
    };
    args.end()?;
    control.check()?;
    let text = serde_json::to_string_pretty(&control).map_err(|e| e.to_string())?;
    replace(dir, "control.json", &text).map_err(|e| format!("{}: {e}", dir.display()))
}

pub fn read(dir: &Path) -> Result<Control, String> {
    let path = dir.join("control.json");
    let text = fs::read_to_string(&path)
        .map_err(|e| format!("{}: {e} (fake-nvml init makes one)", path.display()))?;
    Control::parse(&text).map_err(|e| format!("{}: {e}", path.display()))
}

fn init(args: &mut Args) -> Result<Control, String> {
    let profile = args.option("--profile")?.ok_or("init wants --profile")?;
    let mut control = Control::new(&profile, args.number("--count")?.unwrap_or(1));
    if let Some(version) = args.option("--driver")? {
        control.driver_version = version;
    }
    if let Some(seed) = args.option("--seed")? {
        control.host_seed = seed;
    }
    while let Some(mig) = args.option("--mig")? {
        let (gpu, instances) = mig.split_once('=').ok_or("--mig wants GPU=PROFILE,...")?;
        control.gpus.entry(parse(gpu, "a GPU")?).or_default().mig = Some(mig_of(instances)?);
    }
    Ok(control)
}

/// What a reset does: MIG instances end, and the MIG mode that is pending comes into force.
pub fn reset(dir: &Path, mut args: Args) -> Result<(), String> {
    let control = read(dir)?;
    let gpu = board(&control, &mut args)?;
    args.end()?;
    let node = Node::new(dir, control, state::read(dir));
    let gpu = node.gpus.get(gpu).ok_or("no such GPU")?;
    if gpu.processes().next().is_some() {
        return Err(format!("GPU {} is in use", gpu.index));
    }
    let done = node.change_mig(gpu, |mig| {
        mig.reset();
        Ok(())
    });
    done.map_err(|code| format!("state.json: {}", fake_nvml::code::name(code.0)))
}

/// `1g.10gb,2g.20gb@4`, `on` or `off`.
fn mig_of(text: &str) -> Result<MigControl, String> {
    if text == "on" || text == "off" {
        return Ok(MigControl { enabled: text == "on", instances: Vec::new() });
    }
    let mut instances = Vec::new();
    for one in text.split(',') {
        let (place, compute) = match one.split_once('/') {
            Some((place, slices)) => {
                let each = slices.split('+').map(|slices| parse(slices, "a number of slices"));
                (place, Some(each.collect::<Result<_, _>>()?))
            }
            None => (one, None),
        };
        let (profile, placement) = match place.split_once('@') {
            Some((profile, start)) => (profile, Some(parse(start, "a placement")?)),
            None => (place, None),
        };
        instances.push(InstanceControl { profile: profile.to_owned(), placement, compute });
    }
    Ok(MigControl { enabled: true, instances })
}

fn change(control: &mut Control, command: &str, args: &mut Args) -> Result<(), String> {
    match command {
        "set-mig" => {
            let gpu = board(control, args)?;
            let mig = mig_of(&args.word("off, on or profiles")?)?;
            let wanted = fake_nvml::board::find(&control.profile).ok_or("no such profile")?;
            let (_, words) = fake_nvml::mig::Mig::from_control(wanted, &mig);
            if let Some(words) = words.first() {
                return Err(words.clone());
            }
            on(control, gpu).mig = Some(mig);
        }
        "lose" | "recover" => {
            let gpu = board(control, args)?;
            on(control, gpu).lost = command == "lose";
        }
        "xid" => {
            let gpu = board(control, args)?;
            let value = args.value("an Xid")?;
            event(control, gpu, EventKind::Xid, value, args)?;
        }
        "event" => {
            let gpu = board(control, args)?;
            let kind = serde_json::from_value(args.word("a kind")?.into()).map_err(|e| e.to_string())?;
            let (gi, ci) = (args.option("--gi")?, args.option("--ci")?);
            let value = args.next().map_or(Ok(0), |v| parse(&v, "a value"))?;
            push(control, gpu, kind, value, gi, ci)?;
        }
        "process" => process(control, args)?,
        "fault" => fault(control, args)?,
        "missing" => {
            for name in args.all("a name")? {
                if !control.missing.contains(&name) {
                    control.missing.push(name);
                }
            }
        }
        "set" => set(control, args)?,
        "driver" => match args.word("a version")?.as_str() {
            "load" => control.driver_loaded = true,
            "unload" => control.driver_loaded = false,
            version => version.clone_into(&mut control.driver_version),
        },
        "log" => control.log_calls = args.word("on or off")? == "on",
        "clear" => {
            control.faults.clear();
            control.missing.clear();
            control.driver_loaded = true;
            for gpu in control.gpus.values_mut() {
                gpu.lost = false;
            }
        }
        other => return Err(format!("what is {other}? (see fake-nvml help)")),
    }
    Ok(())
}

fn board(control: &Control, args: &mut Args) -> Result<usize, String> {
    let gpu = args.value("a GPU")?;
    if gpu < control.count {
        Ok(gpu)
    } else {
        Err(format!("there is no GPU {gpu}, the node has {}", control.count))
    }
}

fn on(control: &mut Control, gpu: usize) -> &mut GpuControl {
    control.gpus.entry(gpu).or_default()
}

fn event(
    control: &mut Control,
    gpu: usize,
    kind: EventKind,
    value: u64,
    args: &mut Args,
) -> Result<(), String> {
    let (gi, ci) = (args.option("--gi")?, args.option("--ci")?);
    push(control, gpu, kind, value, gi, ci)
}

fn push(
    control: &mut Control,
    gpu: usize,
    kind: EventKind,
    value: u64,
    gi: Option<String>,
    ci: Option<String>,
) -> Result<(), String> {
    let seq = control.events.iter().map(|e| e.seq).max().unwrap_or(0).saturating_add(1);
    let gi = gi.map(|t| parse(&t, "--gi")).transpose()?;
    let ci = ci.map(|t| parse(&t, "--ci")).transpose()?;
    control.events.push(Event { seq, gpu, kind, value, gi, ci });
    let old = control.events.len().saturating_sub(KEPT_EVENTS);
    control.events.drain(..old);
    Ok(())
}

fn process(control: &mut Control, args: &mut Args) -> Result<(), String> {
    let what = args.word("add or remove")?;
    let gpu = board(control, args)?;
    let pid = args.value("a pid")?;
    let list = &mut on(control, gpu).processes;
    list.retain(|p| p.pid != pid);
    match what.as_str() {
        "remove" => Ok(()),
        "add" => {
            let kind = args.option("--kind")?.unwrap_or_else(|| "compute".to_owned());
            let process = Process {
                pid,
                kind: serde_json::from_value(kind.into()).map_err(|e| e.to_string())?,
                gi: args.number("--gi")?,
                ci: args.number("--ci")?,
                cgroup: args.option("--cgroup")?,
                sm_util: args.number("--sm-util")?.unwrap_or(0),
                only_if_alive: args.flag("--only-if-alive"),
                used_mib: args.next().map(|t| parse(&t, "MiB")).transpose()?,
            };
            list.push(process);
            Ok(())
        }
        other => Err(format!("what is process {other}?")),
    }
}

fn fault(control: &mut Control, args: &mut Args) -> Result<(), String> {
    let call = args.word("a function")?;
    let code = args.word("a return code, or none")?;
    let known = |name: &str| fake_nvml::driver::NAMES.iter().any(|(n, _)| *n == name);
    if call != "*" && !known(&call) {
        return Err(format!("{call} is not a function of the library"));
    }
    let earlier =
        control.faults.get(&call).map_or(0, |f| f.as_slice().iter().map(|f| f.id).max().unwrap_or(0));
    let fault = Fault {
        code: (code != "none").then_some(code),
        gpu: args.number("--gpu")?,
        delay_ms: args.number("--delay-ms")?.unwrap_or(0),
        times: args.number("--times")?,
        after: args.number("--after")?.unwrap_or(0),
        done: args.flag("--done"),
        id: unique(earlier),
    };
    control.faults.insert(call, OneOrMany::One(fault));
    Ok(())
}

/// A number that no earlier fault had, so that counting starts anew.
fn unique(earlier: u64) -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |d| d.as_micros() as u64).max(earlier.saturating_add(1))
}

/// Any field of a board, by its name in the file.
fn set(control: &mut Control, args: &mut Args) -> Result<(), String> {
    let gpu = board(control, args)?;
    let mut value = serde_json::to_value(&*on(control, gpu)).map_err(|e| e.to_string())?;
    for pair in args.all("KEY=VALUE")? {
        let (key, text) = pair.split_once('=').ok_or_else(|| format!("{pair} is not KEY=VALUE"))?;
        let new = serde_json::from_str(text).unwrap_or_else(|_| text.into());
        if let Some(fields) = value.as_object_mut() {
            fields.insert(key.to_owned(), new);
        }
    }
    *on(control, gpu) = serde_json::from_value(value).map_err(|e| e.to_string())?;
    Ok(())
}
