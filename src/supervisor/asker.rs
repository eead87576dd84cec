//! [`Daemons`] over the supervisor's socket: one connection per question, so that nothing is left over
//! when a side dies.

use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use super::words::{self, Ask, Client, DaemonState, LINE_MAX, Question, Say, VERSION};
use super::{Daemons, SOCKET, SupervisorError};
use crate::model::share::{MpsGroup, MpsLimits};

/// A daemon starts in milliseconds; ending servers and setting a compute mode takes seconds at worst.
/// Kubelet gives the whole claim 45 s.
const ANSWER_LIMIT_S: u64 = 20;

/// Asks the supervisor whose folder is `folder`, as this process sees it.
#[derive(Debug, Clone)]
pub struct Asker {
    socket: PathBuf,
}

impl Asker {
    pub fn new(folder: &std::path::Path) -> Self {
        Self { socket: folder.join(SOCKET) }
    }

    fn ask(&self, ask: Ask) -> Result<Say, SupervisorError> {
        let mut lines = self.open(ask)?;
        lines.read()
    }

    fn open(&self, ask: Ask) -> Result<Lines, SupervisorError> {
        let unreachable =
            |source| SupervisorError::Unreachable { path: self.socket.display().to_string(), source };
        let stream = UnixStream::connect(&self.socket).map_err(unreachable)?;
        let limit = Some(Duration::from_secs(ANSWER_LIMIT_S));
        stream.set_read_timeout(limit).and_then(|()| stream.set_write_timeout(limit)).map_err(unreachable)?;
        let mut line = serde_json::to_vec(&Question { version: VERSION, ask }).map_err(not_understood)?;
        line.push(b'\n');
        (&stream).write_all(&line).map_err(failed)?;
        Ok(Lines(BufReader::new(stream)))
    }
}

/// The supervisor's answers on one connection.
struct Lines(BufReader<UnixStream>);

impl Lines {
    fn read(&mut self) -> Result<Say, SupervisorError> {
        let mut line = Vec::new();
        let most = u64::try_from(LINE_MAX).unwrap_or(u64::MAX);
        self.0.by_ref().take(most).read_until(b'\n', &mut line).map_err(failed)?;
        if line.pop() != Some(b'\n') {
            return Err(not_understood("it ended in the middle"));
        }
        match words::answer(&line)? {
            Say::Refused(words) => Err(SupervisorError::Refused(words)),
            said => Ok(said),
        }
    }
}

fn failed(error: io::Error) -> SupervisorError {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => SupervisorError::Timeout { seconds: ANSWER_LIMIT_S },
        _ => not_understood(error),
    }
}

fn not_understood(problem: impl ToString) -> SupervisorError {
    SupervisorError::Answer { problem: problem.to_string() }
}

fn other(said: &Say) -> SupervisorError {
    not_understood(format!("{said:?} is no answer to the question"))
}

impl Daemons for Asker {
    fn keep(
        &self,
        group: &MpsGroup,
        exclusive: bool,
        limits: &MpsLimits,
    ) -> Result<DaemonState, SupervisorError> {
        let (group, limits) = (group.clone(), limits.clone());
        match self.ask(Ask::Keep { group, exclusive, limits })? {
            Say::Kept(state) => Ok(*state),
            said => Err(other(&said)),
        }
    }

    fn rest(&self, group: &MpsGroup) -> Result<(), SupervisorError> {
        match self.ask(Ask::Rest { group: group.clone() })? {
            Say::Done => Ok(()),
            said => Err(other(&said)),
        }
    }

    fn states(&self) -> Result<Vec<DaemonState>, SupervisorError> {
        match self.ask(Ask::States)? {
            Say::States(states) => Ok(states),
            said => Err(other(&said)),
        }
    }

    fn clients(&self, group: &MpsGroup) -> Result<Vec<Client>, SupervisorError> {
        match self.ask(Ask::Clients { group: group.clone() })? {
            Say::Clients(clients) => Ok(clients),
            said => Err(other(&said)),
        }
    }

    fn terminate(&self, group: &MpsGroup, client: Client) -> Result<(), SupervisorError> {
        match self.ask(Ask::Terminate { group: group.clone(), client })? {
            Say::Done => Ok(()),
            said => Err(other(&said)),
        }
    }
}
