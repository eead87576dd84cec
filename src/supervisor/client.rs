//! [`Daemons`] over the supervisor's socket: one connection per request, so that
//! nothing is left over when one side ends.

use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use super::protocol::{self, DaemonState, LINE_MAX, MpsClient, Request, RequestMessage, Response, VERSION};
use super::{Daemons, SOCKET, SupervisorError};
use crate::model::share::{MpsGroup, MpsLimits};

/// A daemon starts in milliseconds; ending servers and setting a compute mode takes seconds at worst.
/// Kubelet gives the whole claim 45 s.
const ANSWER_LIMIT_S: u64 = 20;

/// A client of the supervisor. Each request blocks its thread, at most for the time limit.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
}

impl Client {
    pub fn new(folder: &std::path::Path) -> Self {
        Self { socket: folder.join(SOCKET) }
    }

    fn send(&self, request: Request) -> Result<Response, SupervisorError> {
        let mut lines = self.open(request)?;
        lines.read()
    }

    fn open(&self, request: Request) -> Result<Lines, SupervisorError> {
        let unreachable =
            |source| SupervisorError::Unreachable { path: self.socket.display().to_string(), source };
        let stream = UnixStream::connect(&self.socket).map_err(unreachable)?;
        let limit = Some(Duration::from_secs(ANSWER_LIMIT_S));
        stream.set_read_timeout(limit).and_then(|()| stream.set_write_timeout(limit)).map_err(unreachable)?;
        let mut line =
            serde_json::to_vec(&RequestMessage { version: VERSION, request }).map_err(not_understood)?;
        line.push(b'\n');
        (&stream).write_all(&line).map_err(failed)?;
        Ok(Lines(BufReader::new(stream)))
    }
}

/// The supervisor's responses on one connection.
struct Lines(BufReader<UnixStream>);

impl Lines {
    fn read(&mut self) -> Result<Response, SupervisorError> {
        let mut line = Vec::new();
        let most = u64::try_from(LINE_MAX).unwrap_or(u64::MAX);
        self.0.by_ref().take(most).read_until(b'\n', &mut line).map_err(failed)?;
        if line.pop() != Some(b'\n') {
            return Err(not_understood("it ended in the middle"));
        }
        match protocol::parse_response(&line)? {
            Response::Refused(words) => Err(SupervisorError::Refused(words)),
            response => Ok(response),
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

fn unexpected(response: &Response) -> SupervisorError {
    not_understood(format!("{response:?} is not an answer to the request"))
}

impl Daemons for Client {
    fn keep(
        &self,
        group: &MpsGroup,
        exclusive: bool,
        limits: &MpsLimits,
    ) -> Result<DaemonState, SupervisorError> {
        let (group, limits) = (group.clone(), limits.clone());
        match self.send(Request::Keep { group, exclusive, limits })? {
            Response::Kept(state) => Ok(*state),
            response => Err(unexpected(&response)),
        }
    }

    fn rest(&self, group: &MpsGroup) -> Result<(), SupervisorError> {
        match self.send(Request::Rest { group: group.clone() })? {
            Response::Done => Ok(()),
            response => Err(unexpected(&response)),
        }
    }

    fn states(&self) -> Result<Vec<DaemonState>, SupervisorError> {
        match self.send(Request::States)? {
            Response::States(states) => Ok(states),
            response => Err(unexpected(&response)),
        }
    }

    fn clients(&self, group: &MpsGroup) -> Result<Vec<MpsClient>, SupervisorError> {
        match self.send(Request::Clients { group: group.clone() })? {
            Response::Clients(clients) => Ok(clients),
            response => Err(unexpected(&response)),
        }
    }

    fn terminate(&self, group: &MpsGroup, client: MpsClient) -> Result<(), SupervisorError> {
        match self.send(Request::Terminate { group: group.clone(), client })? {
            Response::Done => Ok(()),
            response => Err(unexpected(&response)),
        }
    }
}
