//! Lists, watches and single objects as bytes: requests and credentials are kube's, the body is read here, and never as
//! one text.

use std::pin::Pin;
use std::time::Duration;

use futures::io::{AsyncBufRead, AsyncBufReadExt};
use http::Request;
use kube::Client;
use serde::Deserialize;
use serde::de::Error as _;
use thiserror::Error;

use super::cut::{Cutter, OBJECT_BYTES_MAX, Piece, StreamPart};
use super::guarded::{ReadKind, read};
use super::sieve::{Keep, fields, sieve};

/// Objects that are asked for at once; more come in further pages.
pub(super) const PAGE: u32 = 500;
/// A list that has no end after so many pages is none.
pub(super) const PAGES_MAX: usize = 10_000;
/// How long nothing may come of a list, or of an answer's beginning.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// Why a list or a watch ended before its time.
#[derive(Debug, Error)]
pub(super) enum ReadError {
    #[error(transparent)]
    Call(#[from] kube::Error),
    #[error("the connection broke")]
    Broken(#[source] std::io::Error),
    #[error("nothing has come from the API server for {} s", .0.as_secs())]
    Silence(Duration),
    #[error("what the API server sent cannot be read")]
    Garbled(#[from] super::cut::Garbled),
    #[error("the API server's answer is cut short")]
    Short,
    #[error("the list has more than {PAGES_MAX} pages")]
    Endless,
    #[error("the API server ended the watch: {0}")]
    Ended(Box<kube::core::Status>),
}

impl ReadError {
    /// The status with which it was refused, if it was.
    pub fn code(&self) -> Option<u16> {
        match self {
            Self::Call(kube::Error::Api(status)) | Self::Ended(status) => Some(status.code),
            _ => None,
        }
    }
}

impl From<ReadError> for kube::Error {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Call(error) => error,
            ReadError::Garbled(_) => Self::SerdeError(serde_json::Error::custom(error)),
            error => Self::ReadEvents(std::io::Error::other(error)),
        }
    }
}

type Body = Pin<Box<dyn AsyncBufRead + Send>>;

async fn open(client: &Client, request: Request<Vec<u8>>) -> Result<Body, ReadError> {
    match tokio::time::timeout(SILENCE_MAX, client.request_stream(request)).await {
        Ok(body) => Ok(Box::pin(body?)),
        Err(_) => Err(ReadError::Silence(SILENCE_MAX)),
    }
}

/// A body that is cut into objects.
struct Pieces {
    body: Body,
    cutter: Cutter,
    silence: Duration,
}

impl Pieces {
    /// None: the body has ended where it may.
    async fn next(&mut self) -> Result<Option<StreamPart>, ReadError> {
        // To the body's own end: before that the connection serves nobody else.
        loop {
            let part = tokio::time::timeout(self.silence, self.body.fill_buf()).await;
            let part = part.map_err(|_| ReadError::Silence(self.silence))?.map_err(ReadError::Broken)?;
            if part.is_empty() {
                return if self.cutter.may_end() { Ok(None) } else { Err(ReadError::Short) };
            }
            let (used, found) = self.cutter.take(part)?;
            self.body.as_mut().consume(used);
            if found != StreamPart::Nothing {
                return Ok(Some(found));
            }
        }
    }
}

/// One page of a list.
pub(super) struct Page {
    pieces: Pieces,
    about: ListMeta,
}

/// The metadata of a list.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct ListMeta {
    #[serde(rename = "resourceVersion", deserialize_with = "text")]
    pub resource_version: String,
    /// Where the next page begins; empty: there is none.
    #[serde(rename = "continue", deserialize_with = "text")]
    pub next: String,
}

/// `null` is as good as nothing, as everywhere in the API.
fn text<'de, D: serde::Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    Option::deserialize(from).map(Option::unwrap_or_default)
}

impl Page {
    pub async fn open(client: &Client, request: Request<Vec<u8>>) -> Result<Self, ReadError> {
        let body = open(client, request).await?;
        let pieces = Pieces { body, cutter: Cutter::list(), silence: SILENCE_MAX };
        Ok(Self { pieces, about: ListMeta::default() })
    }

    /// The next object; none: that was the last of this page.
    pub async fn next(&mut self) -> Result<Option<Piece>, ReadError> {
        while let Some(found) = self.pieces.next().await? {
            match found {
                StreamPart::Object(piece) => return Ok(Some(piece)),
                StreamPart::Field(name, value) if name == b"\"metadata\"" => {
                    let about = serde_json::from_slice(&value.bytes);
                    self.about = about.map_err(kube::Error::SerdeError)?;
                }
                StreamPart::Field(..) | StreamPart::Nothing => {}
            }
        }
        Ok(None)
    }

    /// What the page says of itself, once its last object was read.
    pub fn about(self) -> ListMeta {
        self.about
    }
}

/// One item of a watch.
#[derive(Debug)]
pub(super) enum WatchItem {
    Stored(Piece),
    Deleted(Piece),
    /// Nothing of an object: the watch has come as far as this version.
    Bookmark(String),
}

pub(super) struct Watch {
    pieces: Pieces,
}

impl Watch {
    /// `silence`: the longest that nothing may come, bookmarks included.
    pub async fn open(
        client: &Client,
        request: Request<Vec<u8>>,
        silence: Duration,
    ) -> Result<Self, ReadError> {
        let body = open(client, request).await?;
        Ok(Self { pieces: Pieces { body, cutter: Cutter::watch(), silence } })
    }

    /// None: the API server has ended it, as it does after a while.
    pub async fn next(&mut self) -> Result<Option<WatchItem>, ReadError> {
        while let Some(found) = self.pieces.next().await? {
            let StreamPart::Object(event) = found else { continue };
            if let Some(watch_item) = watch_item(event)? {
                return Ok(Some(watch_item));
            }
        }
        Ok(None)
    }
}

/// None: of a type that is not known.
fn watch_item(event: Piece) -> Result<Option<WatchItem>, ReadError> {
    let [kind, object] = fields(&event.bytes, ["type", "object"]);
    let (kind, object) = (kind.unwrap_or_default(), object.unwrap_or_default());
    let piece = || Piece { bytes: object.to_vec(), whole: event.whole };
    Ok(match kind {
        b"\"ADDED\"" | b"\"MODIFIED\"" => Some(WatchItem::Stored(piece())),
        b"\"DELETED\"" => Some(WatchItem::Deleted(piece())),
        b"\"BOOKMARK\"" => version_of(object).map(WatchItem::Bookmark),
        b"\"ERROR\"" => {
            let readable = sieve(object, Keep::All).unwrap_or_default();
            let status = serde_json::from_slice(&readable);
            return Err(ReadError::Ended(Box::new(status.map_err(kube::Error::SerdeError)?)));
        }
        _ => None,
    })
}

/// The version of an object as it stands in its metadata.
pub(super) fn version_of(object: &[u8]) -> Option<String> {
    let [metadata] = fields(object, ["metadata"]);
    let [version] = fields(metadata?, ["resourceVersion"]);
    serde_json::from_slice::<String>(version?).ok().filter(|version| !version.is_empty())
}

/// The one object that a request is answered with.
///
/// # Errors
/// The request's own, or `SerdeError`: the object does not fit.
pub(super) async fn object<K: ReadKind>(
    client: &Client,
    request: Request<Vec<u8>>,
) -> Result<K, kube::Error> {
    let misfit = |problem| kube::Error::SerdeError(serde_json::Error::custom(problem));
    read(&answer(client, request).await?).map_err(|one| misfit(one.problem))
}

/// What a request is answered with.
pub(super) async fn answer(client: &Client, request: Request<Vec<u8>>) -> Result<Piece, kube::Error> {
    answer_up_to(OBJECT_BYTES_MAX, client, request).await
}

/// The same; of an answer of more than `most` bytes the beginning.
pub(super) async fn answer_up_to(
    most: usize,
    client: &Client,
    request: Request<Vec<u8>>,
) -> Result<Piece, kube::Error> {
    let mut body = open(client, request).await?;
    let (mut bytes, mut whole) = (Vec::new(), true);
    loop {
        let part = tokio::time::timeout(SILENCE_MAX, body.fill_buf()).await;
        let part = part.map_err(|_| ReadError::Silence(SILENCE_MAX))?.map_err(ReadError::Broken)?;
        if part.is_empty() {
            break;
        }
        let room = most - bytes.len();
        whole &= part.len() <= room;
        bytes.extend_from_slice(&part[..part.len().min(room)]);
        let used = part.len();
        body.as_mut().consume(used);
        if !whole {
            break;
        }
    }
    Ok(Piece { bytes, whole })
}
