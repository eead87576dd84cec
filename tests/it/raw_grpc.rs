//! A gRPC client that sends exactly the bytes it is told to, down to the `:authority`, which ready
//! clients would check or normalise first. Unary calls, one after the other, no HPACK decoding.

use std::io;
use std::path::Path;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;

const END_STREAM: u8 = 1;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;

/// HTTP/2's error code for a malformed request (RFC 9113, 7).
pub const PROTOCOL_ERROR: u32 = 1;

#[derive(Debug, thiserror::Error)]
pub enum RawError {
    #[error("connection: {0}")]
    Io(#[from] io::Error),
    #[error("stream reset with HTTP/2 error {0}")]
    Reset(u32),
    #[error("connection closed by the server with HTTP/2 error {0}")]
    GoneAway(u32),
    #[error("an error status instead of a message")]
    NoMessage,
    #[error("the answer is no message of the expected type: {0}")]
    Decode(#[from] prost::DecodeError),
}

pub struct RawGrpc {
    stream: UnixStream,
    next: u32,
}

impl RawGrpc {
    pub async fn connect(socket: &Path) -> Result<Self, RawError> {
        let mut stream = UnixStream::connect(socket).await?;
        stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await?;
        stream.write_all(&frame(SETTINGS, 0, 0, &[])).await?;
        Ok(Self { stream, next: 1 })
    }

    /// Calls `path` (`/package.Service/Method`) with this `:authority`, or with none.
    pub async fn call<Q: prost::Message, A: prost::Message + Default>(
        &mut self,
        authority: Option<&str>,
        path: &str,
        request: &Q,
    ) -> Result<A, RawError> {
        let id = self.next;
        self.next += 2;
        let message = request.encode_to_vec();
        let mut body = vec![0];
        body.extend((message.len() as u32).to_be_bytes());
        body.extend(message);
        let mut out = frame(HEADERS, END_HEADERS, id, &header_block(authority, path));
        out.extend(frame(DATA, END_STREAM, id, &body));
        self.stream.write_all(&out).await?;
        let answer = self.answer(id).await?;
        Ok(A::decode(answer.get(5..).ok_or(RawError::NoMessage)?)?)
    }

    async fn answer(&mut self, id: u32) -> Result<Vec<u8>, RawError> {
        let mut body = Vec::new();
        loop {
            let (kind, flags, stream, payload) = self.read().await?;
            match kind {
                DATA if stream == id => body.extend(payload),
                RST_STREAM if stream == id => return Err(RawError::Reset(number(&payload))),
                GOAWAY => return Err(RawError::GoneAway(number(&payload[4..]))),
                SETTINGS if flags & ACK == 0 => self.stream.write_all(&frame(SETTINGS, ACK, 0, &[])).await?,
                PING if flags & ACK == 0 => self.stream.write_all(&frame(PING, ACK, 0, &payload)).await?,
                _ => {}
            }
            if stream == id && matches!(kind, DATA | HEADERS) && flags & END_STREAM != 0 {
                return Ok(body);
            }
        }
    }

    async fn read(&mut self) -> io::Result<(u8, u8, u32, Vec<u8>)> {
        let mut head = [0; 9];
        self.stream.read_exact(&mut head).await?;
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        let mut payload = vec![0; length];
        self.stream.read_exact(&mut payload).await?;
        Ok((head[3], head[4], number(&head[5..]), payload))
    }
}

fn number(bytes: &[u8]) -> u32 {
    u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut out = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    out.extend([kind, flags]);
    out.extend(stream.to_be_bytes());
    out.extend(payload);
    out
}

fn header_block(authority: Option<&str>, path: &str) -> Vec<u8> {
    let mut block = Vec::new();
    literal(&mut block, ":method", "POST");
    literal(&mut block, ":scheme", "http");
    literal(&mut block, ":path", path);
    if let Some(authority) = authority {
        literal(&mut block, ":authority", authority);
    }
    literal(&mut block, "content-type", "application/grpc");
    literal(&mut block, "te", "trailers");
    block
}

/// A header that neither uses nor changes HPACK's tables (RFC 7541, 6.2.2).
fn literal(block: &mut Vec<u8>, name: &str, value: &str) {
    block.push(0);
    for text in [name, value] {
        let length = text.len();
        if length < 127 {
            block.push(length as u8);
        } else {
            let rest = length - 127;
            assert!(rest < 1 << 14, "header too long for this client");
            block.push(127);
            if rest >= 128 {
                block.push((rest % 128) as u8 | 128);
                block.push((rest / 128) as u8);
            } else {
                block.push(rest as u8);
            }
        }
        block.extend(text.bytes());
    }
}
