//! The supervisor's side of the socket: one request per connection, for root alone, with deadlines.

use std::fs::{self, Permissions};
use std::future::Future;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use nix::unistd::geteuid;
use thiserror::Error;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tracing::{debug, warn};

use super::SOCKET;
use super::protocol::{LINE_MAX, Request, Response, ResponseMessage, VERSION, parse_request};

/// `node` asks for each claim on a connection of its own; kubelet prepares tens at once. More wait in the
/// kernel's queue.
const CONNECTIONS_MAX: usize = 64;
/// For the whole request, once connected, and for the client to take the response.
const LINE_LIMIT: Duration = Duration::from_secs(5);
/// What a live supervisor takes at most to accept.
const PROBE_LIMIT: Duration = Duration::from_secs(1);
/// After a failed accept (no file descriptors left), so that the loop does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Handles requests. Every implementation keeps a time limit of its own.
pub trait RequestHandler: Send + Sync + 'static {
    fn handle(&self, request: Request) -> impl Future<Output = Response> + Send;
}

#[derive(Debug, Error)]
pub enum ListenError {
    #[error("another `tranche mps` answers on {path}; only one may supervise the daemons of a node")]
    Alive { path: PathBuf },
    #[error("cannot listen on {path}")]
    Bind { path: PathBuf, source: io::Error },
}

/// A socket that listens and does not answer yet.
pub struct Listener {
    socket: UnixListener,
    path: PathBuf,
}

impl Listener {
    /// Takes the socket in the supervisor's folder. One that a dead supervisor left is replaced.
    pub async fn bind(folder: &Path) -> Result<Self, ListenError> {
        let path = folder.join(SOCKET);
        if let Ok(Ok(_)) = timeout(PROBE_LIMIT, UnixStream::connect(&path)).await {
            return Err(ListenError::Alive { path });
        }
        match bind_for_root(folder, &path) {
            Ok(socket) => Ok(Self { socket, path }),
            Err(source) => Err(ListenError::Bind { path, source }),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Answers until told, then lets the answers under way finish.
    pub async fn serve(self, handler: Arc<impl RequestHandler>, until: impl Future<Output = ()>) {
        let mut connections = JoinSet::new();
        let mut until = pin!(until);
        loop {
            tokio::select! {
                () = &mut until => break,
                accepted = self.socket.accept(), if connections.len() < CONNECTIONS_MAX => match accepted {
                    Ok((stream, _)) => {
                        connections.spawn(connection(stream, handler.clone()));
                    }
                    Err(error) => {
                        warn!(%error, "cannot accept a connection of the node plugin");
                        sleep(ACCEPT_PAUSE).await;
                    }
                },
                Some(_) = connections.join_next() => {}
            }
        }
        // Whoever comes now finds nobody, rather than a queue that nobody serves.
        let _ = fs::remove_file(&self.path);
        drop(self.socket);
        while connections.join_next().await.is_some() {}
    }
}

/// Never seen by others, not even for a moment: it gets its name when its mode is set.
fn bind_for_root(folder: &Path, path: &Path) -> io::Result<UnixListener> {
    let temporary = folder.join(format!(".{SOCKET}"));
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let socket = UnixListener::bind(&temporary)?;
    fs::set_permissions(&temporary, Permissions::from_mode(0o600))?;
    fs::rename(&temporary, path)?;
    Ok(socket)
}

async fn connection(mut stream: UnixStream, handler: Arc<impl RequestHandler>) {
    match peer(&stream) {
        Ok(uid) if uid == 0 || uid == geteuid().as_raw() => {}
        Ok(uid) => return warn!(uid, "a connection of another user was closed"),
        Err(error) => return warn!(%error, "a connection was closed: its user is not known"),
    }
    let response = match timeout(LINE_LIMIT, line(&mut stream)).await {
        Ok(Ok(line)) => match parse_request(&line) {
            Ok(request) => handler.handle(request).await,
            Err(words) => Response::Refused(words),
        },
        Ok(Err(error)) => return debug!(%error, "a connection ended before its request"),
        Err(_) => return debug!("a connection sent no request in time"),
    };
    let Ok(mut line) = serde_json::to_vec(&ResponseMessage { version: VERSION, response }) else { return };
    line.push(b'\n');
    if !matches!(timeout(LINE_LIMIT, stream.write_all(&line)).await, Ok(Ok(()))) {
        debug!("nobody waited for the answer");
    }
}

fn peer(stream: &UnixStream) -> io::Result<u32> {
    Ok(stream.peer_cred()?.uid())
}

async fn line(stream: &mut UnixStream) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    let most = u64::try_from(LINE_MAX).unwrap_or(u64::MAX);
    BufReader::new(stream).take(most).read_until(b'\n', &mut line).await?;
    match line.pop() {
        Some(b'\n') => Ok(line),
        _ => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the line has no end")),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileTypeExt;

    use tokio::sync::Notify;

    use super::*;
    use crate::model::share::MpsGroup;
    use crate::supervisor::protocol::{DaemonPhase, DaemonState};
    use crate::supervisor::{Client, Daemons, SupervisorError};

    const DEADLINE: Duration = Duration::from_secs(20);

    struct Fixed;

    impl RequestHandler for Fixed {
        async fn handle(&self, request: Request) -> Response {
            match request {
                Request::States => Response::States(vec![DaemonState {
                    group: MpsGroup::new(["GPU-1".into()]),
                    exclusive: true,
                    phase: DaemonPhase::Down { reason: "test".to_owned() },
                    limits: None,
                    memory_answers: vec![],
                    compute_answer: String::new(),
                    deaths: 3,
                    servers: vec![],
                    shm: None,
                }]),
                _ => Response::Refused("not today".to_owned()),
            }
        }
    }

    struct Served {
        dir: tempfile::TempDir,
        stop: Arc<Notify>,
        tasks: JoinSet<()>,
    }

    async fn serve(dir: tempfile::TempDir) -> Served {
        let listener = Listener::bind(dir.path()).await.unwrap();
        let (stop, mut tasks) = (Arc::new(Notify::new()), JoinSet::new());
        let until = stop.clone();
        tasks.spawn(async move { listener.serve(Arc::new(Fixed), until.notified()).await });
        Served { dir, stop, tasks }
    }

    async fn ask<T: Send + 'static>(
        served: &Served,
        request: impl FnOnce(Client) -> Result<T, SupervisorError> + Send + 'static,
    ) -> Result<T, SupervisorError> {
        let client = Client::new(served.dir.path());
        tokio::task::spawn_blocking(move || request(client)).await.unwrap()
    }

    /// Sends bytes, returns the whole answer.
    async fn send(served: &Served, bytes: &[u8]) -> String {
        let mut stream = UnixStream::connect(served.dir.path().join(SOCKET)).await.unwrap();
        // A server that refuses early may close while we still write.
        let _ = stream.write_all(bytes).await;
        let mut answer = Vec::new();
        let read = timeout(DEADLINE, stream.read_to_end(&mut answer)).await.expect("an end in time");
        // The answer comes first; then that it had not read all of the question.
        if let Err(error) = read {
            assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
        }
        String::from_utf8(answer).unwrap()
    }

    #[tokio::test]
    async fn questions_are_answered_and_refusals_carry_their_words() {
        let served = serve(tempfile::tempdir().unwrap()).await;
        let states = ask(&served, |client| client.states()).await.unwrap();
        assert_eq!(states[0].deaths, 3);
        let refused = ask(&served, |client| client.rest(&MpsGroup::new([]))).await.unwrap_err();
        assert_eq!(refused.to_string(), "not today");
    }

    #[tokio::test]
    async fn the_names_on_the_wire_are_those_of_the_first_version() {
        let served = serve(tempfile::tempdir().unwrap()).await;
        let answer = send(&served, b"{\"version\":1,\"ask\":\"States\"}\n").await;
        assert!(answer.starts_with("{\"version\":1,\"say\":{\"States\":[{\"group\":[\"GPU-1\"]"), "{answer}");
    }

    #[tokio::test]
    async fn another_version_is_told_ours() {
        let served = serve(tempfile::tempdir().unwrap()).await;
        let answer = send(&served, b"{\"version\":2,\"ask\":{\"Brew\":{}}}\n").await;
        assert!(answer.starts_with("{\"version\":1,"), "{answer}");
        assert!(answer.contains("speaks version 1 and was asked in version 2"), "{answer}");
    }

    #[tokio::test]
    async fn nonsense_is_refused_and_half_a_line_gets_no_answer() {
        let served = serve(tempfile::tempdir().unwrap()).await;
        assert!(send(&served, b"hello\n").await.contains("not understood"));
        assert!(send(&served, b"{\"version\":1,\"ask\":\"Brew\"}\n").await.contains("not understood"));
        // Longer than any line may be, without an end.
        assert_eq!(send(&served, &vec![b'x'; LINE_MAX + 1]).await, "");
        assert!(ask(&served, |client| client.states()).await.is_ok());
    }

    #[tokio::test]
    async fn connections_that_ask_nothing_do_not_stop_it_for_good() {
        let served = serve(tempfile::tempdir().unwrap()).await;
        let mut idle = Vec::new();
        for _ in 0..CONNECTIONS_MAX {
            idle.push(UnixStream::connect(served.dir.path().join(SOCKET)).await.unwrap());
        }
        assert!(ask(&served, |client| client.states()).await.is_ok());
    }

    #[tokio::test]
    async fn the_socket_is_for_root_alone_a_stale_one_is_replaced_and_a_live_one_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(SOCKET);
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let served = serve(dir).await;
        let meta = fs::metadata(&path).unwrap();
        assert!(meta.file_type().is_socket() && meta.permissions().mode() & 0o777 == 0o600);
        let refused = Listener::bind(served.dir.path()).await.err().unwrap();
        assert!(matches!(refused, ListenError::Alive { .. }), "{refused}");
        assert!(ask(&served, |client| client.states()).await.is_ok(), "the first one goes on");
    }

    #[tokio::test]
    async fn told_to_end_it_ends_and_takes_its_file_along() {
        let mut served = serve(tempfile::tempdir().unwrap()).await;
        served.stop.notify_one();
        timeout(DEADLINE, served.tasks.join_next()).await.expect("it ends");
        assert!(!served.dir.path().join(SOCKET).exists());
        let gone = ask(&served, |client| client.states()).await.unwrap_err();
        assert!(matches!(gone, SupervisorError::Unreachable { .. }), "{gone}");
    }
}
