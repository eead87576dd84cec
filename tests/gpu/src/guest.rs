//! The other side of a tenant: a process of its own that does with CUDA what it is told, one line at a time,
//! and ends when nobody tells it anything any more.

use std::io::{self, BufRead, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::cuda::{Called, Chunk, Cuda, Kernels, Pool, WORK_THREADS, ptx};
use crate::descriptors;
use crate::protocol::{Allocator, Failure, Opened, Reply, Request, Spread, Stop};

/// A page of the GPU; every one of them is written to.
const PAGE: u64 = 64 << 10;
/// Nobody's address: the first page.
const NOWHERE: u64 = 16;
const SMALL: u64 = 4 << 10;
const LISTEN: Duration = Duration::from_secs(20);

/// Answers every line of stdin with one on stdout.
pub fn serve(library: &Path) -> Result<()> {
    let mut guest = Guest { library: library.to_owned(), open: None };
    let (input, mut output) = (io::stdin().lock(), io::stdout().lock());
    for line in input.lines() {
        let said = match serde_json::from_str(&line?).context("a line that is not understood")? {
            Request::Open => guest.open()?,
            ask => guest.obey(ask).unwrap_or_else(Reply::Failed),
        };
        serde_json::to_writer(&mut output, &said)?;
        output.write_all(b"\n")?;
        output.flush()?;
    }
    Ok(())
}

struct Guest {
    library: PathBuf,
    open: Option<Open>,
}

struct Open {
    cuda: Cuda,
    kernels: Kernels,
    pool: Option<Pool>,
    held: Vec<Held>,
}

enum Held {
    Linear { at: u64, bytes: u64 },
    Stream { at: u64, bytes: u64 },
    Chunk(Chunk),
}

impl Held {
    fn range(&self) -> (u64, u64) {
        match *self {
            Self::Linear { at, bytes } | Self::Stream { at, bytes } => (at, bytes),
            Self::Chunk(chunk) => (chunk.at, chunk.bytes),
        }
    }
}

impl Guest {
    fn open(&mut self) -> Result<Reply> {
        let cuda = match Cuda::open(&self.library)? {
            Ok(cuda) => cuda,
            Err(failure) => return Ok(Reply::Failed(failure)),
        };
        Ok(match cuda.kernels() {
            Err(failure) => Reply::Failed(failure),
            Ok(kernels) => {
                let opened: Opened = cuda.opened.clone();
                self.open = Some(Open { cuda, kernels, pool: None, held: Vec::new() });
                Reply::Opened(opened)
            }
        })
    }

    fn obey(&mut self, ask: Request) -> Called<Reply> {
        let open = self.open.as_mut().ok_or_else(|| Failure::ours("gpu-check", "nothing was opened yet"))?;
        match ask {
            Request::Open => Err(Failure::ours("gpu-check", "it is open already")),
            Request::Info => open.cuda.memory().map(|(free, total)| Reply::Memory { free, total }),
            Request::Grow { way, step, most, pause_ms } => {
                open.grow(way, step, most, Duration::from_millis(pause_ms))
            }
            Request::Touch => open.touch(),
            Request::Free => open.free(),
            Request::Export { socket } => open.export(&socket),
            Request::Import { socket } => open.import(&socket),
            Request::Where { blocks, ms } => open.whereabouts(blocks, ms),
            Request::Work { ms } => open.work(Duration::from_millis(ms)),
            Request::Spin { ms } => open.cuda.spin(&open.kernels, open.cuda.cycles(ms)).map(|()| Reply::Done),
            Request::Wait => open.cuda.wait().map(|()| Reply::Done),
            Request::Stray => {
                let launched = open.cuda.stray(&open.kernels, NOWHERE);
                launched.and_then(|()| open.cuda.wait()).map(|()| Reply::Done)
            }
            Request::Latency { rounds } => open.latency(rounds),
        }
    }
}

impl Open {
    fn grow(&mut self, way: Allocator, step: u64, most: u64, pause: Duration) -> Called<Reply> {
        if way == Allocator::Pool && self.pool.is_none() {
            self.pool = Some(self.cuda.new_pool()?);
        }
        let (mut bytes, mut steps) = (0, 0);
        let stop = loop {
            if bytes >= most {
                break Stop::Enough;
            }
            match self.take(way, step) {
                Ok(held) => {
                    bytes += held.range().1;
                    self.held.push(held);
                }
                Err(failure) => break Stop::Refused(failure),
            }
            steps += 1;
            wait(pause);
        };
        Ok(Reply::Grown { bytes, steps, stop })
    }

    fn take(&self, way: Allocator, bytes: u64) -> Called<Held> {
        match way {
            Allocator::Linear => self.cuda.take(bytes).map(|at| Held::Linear { at, bytes }),
            Allocator::Managed => self.cuda.take_managed(bytes).map(|at| Held::Linear { at, bytes }),
            Allocator::Chunks => self.cuda.take_chunk(bytes).map(Held::Chunk),
            Allocator::Stream | Allocator::Pool => {
                let pool = self.pool.filter(|_| way == Allocator::Pool);
                let at = self.cuda.take_from(pool, bytes)?;
                // What was ordered is there only when the stream has got to it.
                self.cuda.wait().map(|()| Held::Stream { at, bytes })
            }
        }
    }

    fn touch(&self) -> Called<Reply> {
        for held in &self.held {
            let (at, bytes) = held.range();
            self.cuda.touch(&self.kernels, at, bytes, PAGE)?;
        }
        self.cuda.wait().map(|()| Reply::Done)
    }

    fn free(&mut self) -> Called<Reply> {
        for held in self.held.drain(..) {
            match held {
                Held::Linear { at, .. } => self.cuda.give(at)?,
                Held::Stream { at, .. } => self.cuda.give_later(at)?,
                Held::Chunk(chunk) => self.cuda.give_chunk(chunk)?,
            }
        }
        self.cuda.wait()?;
        // A driver without pools has nothing to trim.
        if let Ok(pool) = self.cuda.default_pool() {
            self.cuda.trim(pool)?;
        }
        if let Some(pool) = self.pool {
            self.cuda.trim(pool)?;
        }
        Ok(Reply::Done)
    }

    fn export(&self, socket: &Path) -> Called<Reply> {
        let chunks = self.held.iter().filter_map(|held| match held {
            Held::Chunk(chunk) => Some(self.cuda.export(*chunk).map(|fd| (fd, chunk.bytes))),
            _ => None,
        });
        let chunks = chunks.collect::<Called<Vec<_>>>()?;
        descriptors::send(socket, &chunks, LISTEN)
            .map_err(|error| Failure::ours("send", format!("{error:#}")))?;
        Ok(Reply::Done)
    }

    fn import(&mut self, socket: &Path) -> Called<Reply> {
        let received = descriptors::receive(socket, LISTEN);
        let chunks = received.map_err(|error| Failure::ours("receive", format!("{error:#}")))?;
        let (mut got, mut stop) = (0, Stop::Enough);
        for (fd, bytes) in &chunks {
            use std::os::fd::AsFd;
            match self.cuda.import(fd.as_fd(), *bytes) {
                Ok(chunk) => {
                    got += chunk.bytes;
                    self.cuda.touch(&self.kernels, chunk.at, chunk.bytes, PAGE)?;
                    self.held.push(Held::Chunk(chunk));
                }
                Err(failure) => {
                    stop = Stop::Refused(failure);
                    break;
                }
            }
        }
        self.cuda.wait()?;
        Ok(Reply::Imported { bytes: got, stop })
    }

    fn whereabouts(&self, blocks: u32, ms: u64) -> Called<Reply> {
        let out = self.cuda.take(u64::from(blocks) * 4)?;
        self.cuda.whereabouts(&self.kernels, out, blocks, self.cuda.cycles(ms))?;
        self.cuda.wait()?;
        let on = self.cuda.read_u32(out, blocks as usize)?;
        self.cuda.give(out)?;
        Ok(Reply::Ran { on })
    }

    fn work(&self, time: Duration) -> Called<Reply> {
        const ROUNDS: u32 = 20_000;
        let out = self.cuda.take(SMALL)?;
        let blocks = self.cuda.opened.multiprocessors.max(1) * 8;
        let launch = || self.cuda.work(&self.kernels, out, blocks, ROUNDS).and_then(|()| self.cuda.wait());
        // The first launch loads the code.
        launch()?;
        let begin = Instant::now();
        let mut launches = 0_u64;
        while begin.elapsed() < time {
            launch()?;
            launches += 1;
        }
        let seconds = begin.elapsed().as_secs_f64();
        self.cuda.give(out)?;
        let each = u64::from(blocks) * u64::from(WORK_THREADS) * u64::from(ROUNDS) * ptx::WORK_PER_ROUND;
        Ok(Reply::Worked { per_second: launches as f64 * each as f64 / seconds })
    }

    fn latency(&self, rounds: u32) -> Called<Reply> {
        let micros = |begin: Instant| begin.elapsed().as_secs_f64() * 1e6;
        let (mut launch, mut alloc) = (Vec::new(), Vec::new());
        self.cuda.spin(&self.kernels, 0)?;
        self.cuda.wait()?;
        for _ in 0..rounds {
            let begin = Instant::now();
            self.cuda.spin(&self.kernels, 0)?;
            self.cuda.wait()?;
            launch.push(micros(begin));
        }
        for _ in 0..rounds.min(200) {
            let begin = Instant::now();
            let at = self.cuda.take(SMALL)?;
            self.cuda.give(at)?;
            alloc.push(micros(begin));
        }
        Ok(Reply::Took { launch: Spread::of(launch), alloc: Spread::of(alloc) })
    }
}

fn wait(pause: Duration) {
    std::thread::sleep(pause);
}
