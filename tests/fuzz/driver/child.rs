//! One target: what is stored first, then inputs of all kinds until the time is over.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use fastrand::Rng;

use super::args::Args;
use super::cover::Cover;
use super::meter::{self, Fault};
use super::mutate::{self, Pool};
use super::{Form, Target, corpus, json, pace};

/// Faults of different causes, after which a target is given up.
const FAULTS_MAX: usize = 5;
/// Stack of the threads that do the driver's work (tokio's).
const STACK: usize = 2 << 20;
/// Inputs kept for what they reach.
const POOL_MAX: usize = 20_000;

/// The input under way, for a parent whose child has died of it.
pub struct UnderWay(File);

impl UnderWay {
    pub fn path(target: &str) -> PathBuf {
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fuzz-{target}.input"))
    }

    fn open(target: &str) -> std::io::Result<Self> {
        fs::create_dir_all(env!("CARGO_TARGET_TMPDIR"))?;
        File::create(Self::path(target)).map(Self)
    }

    /// Its length, then the input: one write, and no need to cut what was longer.
    fn note(&self, input: &[u8]) {
        let mut bytes = (input.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(input);
        self.0.write_all_at(&bytes, 0).expect("the input under way can be noted");
    }

    pub fn read(target: &str) -> Option<Vec<u8>> {
        let bytes = fs::read(Self::path(target)).ok()?;
        let (length, input) = bytes.split_first_chunk::<8>()?;
        input.get(..usize::try_from(u64::from_le_bytes(*length)).ok()?).map(<[u8]>::to_vec)
    }
}

struct Work<'a> {
    target: &'a Target,
    under_way: UnderWay,
    inputs: u64,
    slowest: Duration,
    faults: BTreeMap<String, String>,
}

impl Work<'_> {
    /// Runs an input. `stored`: it is in the tree by this name.
    fn try_one(&mut self, input: &[u8], stored: Option<&str>) -> Result<(), String> {
        self.under_way.note(input);
        self.inputs += 1;
        match meter::measure(self.target, input) {
            Ok(cost) => self.slowest = self.slowest.max(cost.time),
            Err(fault) if self.faults.contains_key(&fault.key()) && stored.is_none() => {}
            Err(fault) => self.told(&fault, input, stored)?,
        }
        Ok(())
    }

    fn told(&mut self, fault: &Fault, input: &[u8], stored: Option<&str>) -> Result<(), String> {
        let input = if stored.is_some() { input.to_vec() } else { self.smaller(fault, input) };
        // What it does now, with other numbers in its words maybe.
        let fault = meter::measure(self.target, &input).err().unwrap_or_else(|| fault.clone());
        let name = match stored {
            Some(name) => format!("tests/data/fuzz/{}/{name}", self.target.name),
            None => corpus::store_fault(self.target.name, &fault, &input)
                .map_err(|error| format!("an input of {} cannot be stored: {error}", self.target.name))?
                .display()
                .to_string(),
        };
        let text = String::from_utf8_lossy(&input).into_owned();
        let words = format!("{fault}\n    input: {name}\n    {:?}", meter::shortened(&text));
        self.faults.insert(fault.key(), words);
        Ok(())
    }

    /// As much as can be left out so that the panic stays the same.
    fn smaller(&mut self, fault: &Fault, input: &[u8]) -> Vec<u8> {
        let end = Instant::now() + Duration::from_secs(5);
        let mut stays = |less: &[u8]| {
            if Instant::now() > end {
                return false;
            }
            self.under_way.note(less);
            meter::measure(self.target, less).is_err_and(|found| found.key() == fault.key())
        };
        match fault {
            Fault::Panics(..) if matches!(self.target.form, Form::Json | Form::MadeJson(_)) => {
                json::smaller(input, &mut stays)
            }
            Fault::Panics(..) => mutate::smaller(input, &mut stays),
            _ => input.to_vec(),
        }
    }
}

/// Ends true if all went well.
pub fn run(target: &Target, args: &Args) -> Result<bool, String> {
    meter::hush();
    let (_work_goes_on, end) = channel();
    let under_way = UnderWay::open(target.name).map_err(|error| format!("the input under way: {error}"))?;
    std::thread::spawn(move || meter::watch(&end));
    let mut work = Work { target, under_way, inputs: 0, slowest: Duration::ZERO, faults: BTreeMap::new() };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK);
        let worker =
            thread.spawn_scoped(scope, || all(&mut work, args)).map_err(|error| error.to_string())?;
        worker.join().unwrap_or_else(|_| Err("the driver itself panicked".to_owned()))
    })?;
    for words in work.faults.values() {
        println!("{words}");
    }
    Ok(work.faults.is_empty())
}

fn all(work: &mut Work<'_>, args: &Args) -> Result<(), String> {
    let target = work.target;
    let pending = corpus::pending().map_err(|error| error.to_string())?;
    let put_off = |name: &str| !args.pending && pending.contains_key(name);
    let kept = kept(target.name);
    let mut pool = (target.seeds)();
    for input in &pool {
        work.try_one(input, None)?;
    }
    let stored = corpus::stored(target.name).map_err(|error| format!("{}: {error}", target.name))?;
    for (name, input) in stored {
        if !put_off(&format!("{}/{name}", target.name)) {
            work.try_one(&input, Some(&name))?;
            pool.push(input);
        }
    }
    let mut cover = Cover::new();
    if cover.is_there() {
        for (_, input) in corpus::inputs(&kept).map_err(|error| error.to_string())? {
            work.try_one(&input, None)?;
            pool.push(input);
        }
        cover.take();
        fs::create_dir_all(&kept).map_err(|error| error.to_string())?;
    }
    if !put_off(target.name) {
        random(work, args, pool, &mut cover)?;
    }
    let edges = if cover.is_there() { format!(", {} edges", cover.edges()) } else { String::new() };
    println!("{} inputs, slowest {:.1?}{edges}", work.inputs, work.slowest);
    Ok(())
}

fn random(work: &mut Work<'_>, args: &Args, pool: Vec<Vec<u8>>, cover: &mut Cover) -> Result<(), String> {
    let target = work.target;
    let mut pool = Pool::new(pool, target.words);
    let mut rng = Rng::with_seed(args.seed);
    let mut rest = Rest::new(args.time);
    while rest.is_left() && work.faults.len() < FAULTS_MAX {
        let input = make(target, &pool, &mut rng);
        work.try_one(&input, None)?;
        if cover.is_there() && cover.take() && pool.all.len() < POOL_MAX {
            let path = kept(target.name).join(corpus::name("reaches", &input));
            fs::write(path, &input).map_err(|error| error.to_string())?;
            pool.all.push(input);
        }
    }
    Ok(())
}

/// The time for one target: of a processor, but by the clock at most four times as much.
struct Rest {
    time: Duration,
    begun: Instant,
    before: Duration,
    asked: Instant,
}

impl Rest {
    fn new(time: Duration) -> Self {
        let begun = Instant::now();
        Self { time, begun, before: pace::processor(), asked: begun }
    }

    fn is_left(&mut self) -> bool {
        let passed = self.begun.elapsed();
        if passed < self.time || self.asked.elapsed() < Duration::from_millis(50) {
            return true;
        }
        self.asked = Instant::now();
        passed < self.time * 4 && pace::processor().saturating_sub(self.before) < self.time
    }
}

fn make(target: &Target, pool: &Pool, rng: &mut Rng) -> Vec<u8> {
    let length = match rng.u8(0..4) {
        0 => target.limits.length,
        _ => target.limits.length.min(1 << 12),
    };
    let made = rng.bool();
    match target.form {
        Form::Made(make) if made => {
            let mut text = make(rng);
            text.truncate(text.floor_char_boundary(target.limits.length));
            text.into_bytes()
        }
        Form::MadeJson(make) if made => json::written(&make(rng, pool), pool, target.limits.length, rng),
        Form::Text | Form::Made(_) => mutate::text(pool.pick(rng), pool, length, rng),
        Form::Json | Form::MadeJson(_) => json::mutated(pool.pick(rng), pool, target.limits.length, rng),
    }
}

/// Where inputs lie that were kept for what they reach: not in the tree.
fn kept(target: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("fuzz-pool").join(target)
}

/// One input by hand: what it costs, or how it fails.
pub fn replay(target: &Target, file: &Path) -> Result<bool, String> {
    let input = fs::read(file).map_err(|error| format!("{}: {error}", file.display()))?;
    meter::hush();
    let work = || match meter::measure(target, &input) {
        Ok(cost) => {
            println!("{}: {:.1?}, {} bytes of memory at the peak", target.name, cost.time, cost.bytes);
            true
        }
        Err(fault) => {
            println!("{}: {fault}", target.name);
            false
        }
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK);
        let worker = thread.spawn_scoped(scope, work).map_err(|error| error.to_string())?;
        worker.join().map_err(|_| "the driver itself panicked".to_owned())
    })
}
