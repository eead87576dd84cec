//! What the API server wrote down of its own answers (`audit.yaml`). A watch would tell the same, but late: the API
//! server cuts those that it does not serve in time, and until one stands again its watcher hears nothing.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

use anyhow::{Context, Result, bail};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use serde::Deserialize;
use tokio::time::sleep;

use super::made::{Binder, CLAIMS, LOOK, WAVE};

/// When each claim of a namespace was given its place, and each pod was bound, by name: the moment in which the API
/// server had answered the request that did it.
#[derive(Default)]
pub struct Answered {
    pub allocated: HashMap<String, Instant>,
    /// Empty where nobody binds.
    pub bound: HashMap<String, Instant>,
}

/// One wave's part of the record.
pub struct Audit {
    file: PathBuf,
    namespace: String,
    read: u64,
    /// The end of what was read, without the end of its line.
    rest: Vec<u8>,
    /// The same moment by both clocks.
    now: (Instant, SystemTime),
    answered: Answered,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    stage: String,
    stage_timestamp: MicroTime,
    object_ref: Object,
    response_status: Option<Response>,
}

#[derive(Deserialize)]
struct Object {
    resource: String,
    namespace: Option<String>,
    name: Option<String>,
}

#[derive(Deserialize)]
struct Response {
    code: u16,
}

impl Audit {
    /// What is answered from now on.
    pub fn begin(file: &Path, namespace: &str) -> Result<Self> {
        let read = std::fs::metadata(file).with_context(|| file.display().to_string())?.len();
        let now = (Instant::now(), SystemTime::now());
        let (file, namespace) = (file.to_owned(), namespace.to_owned());
        Ok(Self { file, namespace, read, rest: Vec::new(), now, answered: Answered::default() })
    }

    /// Until every claim is allocated, and every pod is bound if anybody binds.
    pub async fn until_done(mut self, binder: Binder) -> Result<Answered> {
        let deadline = Instant::now() + WAVE;
        loop {
            self.take_in()?;
            let Answered { allocated, bound } = &self.answered;
            if allocated.len() == CLAIMS && (binder == Binder::Nobody || bound.len() == CLAIMS) {
                return Ok(self.answered);
            }
            if Instant::now() > deadline {
                bail!("{} of {CLAIMS} claims are allocated, {} pods bound", allocated.len(), bound.len());
            }
            sleep(LOOK).await;
        }
    }

    fn take_in(&mut self) -> Result<()> {
        let mut file = File::open(&self.file)?;
        file.seek(SeekFrom::Start(self.read))?;
        let more = file.read_to_end(&mut self.rest)?;
        self.read += u64::try_from(more)?;
        let Some(end) = self.rest.iter().rposition(|byte| *byte == b'\n') else { return Ok(()) };
        let rest = self.rest.split_off(end + 1);
        let lines = std::mem::replace(&mut self.rest, rest);
        for line in lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            let entry: Entry = serde_json::from_slice(line).context("a line of the audit log")?;
            self.note(entry)?;
        }
        Ok(())
    }

    /// The first write that succeeds: of a claim's status, its allocation; of a pod's binding, the only one.
    fn note(&mut self, entry: Entry) -> Result<()> {
        let Entry { stage, stage_timestamp, object_ref, response_status } = entry;
        let done =
            stage == "ResponseComplete" && response_status.is_some_and(|one| (200..300).contains(&one.code));
        let (Some(name), true) = (object_ref.name, done) else { return Ok(()) };
        if object_ref.namespace.as_ref() != Some(&self.namespace) {
            return Ok(());
        }
        let when = self.moment(SystemTime::from(stage_timestamp.0))?;
        let Answered { allocated, bound } = &mut self.answered;
        let seen = if object_ref.resource == "pods" { bound } else { allocated };
        seen.entry(name).or_insert(when);
        Ok(())
    }

    fn moment(&self, when: SystemTime) -> Result<Instant> {
        let (instant, system) = self.now;
        let since =
            when.duration_since(system).context("answered before it was asked: the clock was set back")?;
        Ok(instant + since)
    }
}
