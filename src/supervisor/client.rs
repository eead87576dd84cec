//! [`Daemons`] over the supervisor's socket: one connection per request, so that
//! nothing is left over when one side ends.

use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use socket2::{Domain, SockAddr, Socket, Type};

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
    pub fn new(folder: &Path) -> Self {
        Self { socket: folder.join(SOCKET) }
    }

    fn send(&self, request: Request) -> Result<Response, SupervisorError> {
        let mut lines = self.open(request)?;
        lines.read()
    }

    fn open(&self, request: Request) -> Result<Lines, SupervisorError> {
        let limit = Duration::from_secs(ANSWER_LIMIT_S);
        let stream = connect(&self.socket, limit).map_err(|source| match source.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => failed(source),
            _ => SupervisorError::Unreachable { path: self.socket.display().to_string(), source },
        })?;
        let mut line =
            serde_json::to_vec(&RequestMessage { version: VERSION, request }).map_err(not_understood)?;
        line.push(b'\n');
        (&stream).write_all(&line).map_err(failed)?;
        Ok(Lines(BufReader::new(stream)))
    }
}

/// Every step on the connection takes no longer than this, connecting included: where the supervisor stands still, others may
/// have filled its queue of connections.
fn connect(path: &Path, limit: Duration) -> io::Result<UnixStream> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // Linux takes this one for connecting, too.
    socket.set_write_timeout(Some(limit))?;
    socket.set_read_timeout(Some(limit))?;
    socket.connect(&SockAddr::unix(path)?)?;
    Ok(socket.into())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connecting_ends_though_the_queue_of_connections_stays_full() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(SOCKET);
        let address = SockAddr::unix(&path).unwrap();
        let listening = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        listening.bind(&address).unwrap();
        listening.listen(1).unwrap();
        let mut waiting = Vec::new();
        let full = loop {
            let socket = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
            socket.set_nonblocking(true).unwrap();
            match socket.connect(&address) {
                Ok(()) => waiting.push(socket),
                Err(error) => break error,
            }
        };
        assert_eq!(full.kind(), ErrorKind::WouldBlock);
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || tell.send(connect(&path, Duration::from_millis(100)).map(drop)));
        let refused = told.recv_timeout(Duration::from_secs(60)).expect("it waits for ever").unwrap_err();
        assert!(matches!(failed(refused), SupervisorError::Timeout { .. }));
    }
}
