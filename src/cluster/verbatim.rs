//! Metadata of claims that no JSON client can write.
//!
//! The API server keeps the parameters of a claim byte for byte, and a claim's spec may not change. Whatever is sent
//! as JSON comes back from its own decoder without white space between the tokens, so that a claim that was created
//! with some (Python's `json.dumps` writes `{"kind": "GpuShare"}`) counts as changed by every later update in JSON,
//! patches of metadata among them: "spec: field is immutable". As protobuf the parameters go through untouched. So
//! the claim is read as protobuf, only the fields in question are exchanged, and it is written back; its
//! resourceVersion is in there and does what it always does.

use futures::AsyncReadExt;
use http::{Request, header};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::Resource;
use prost::DecodeError;
use prost::bytes::Buf;
use prost::encoding::{
    DecodeContext, WireType, decode_key, decode_varint, encode_key, encode_varint, skip_field,
};
use thiserror::Error;

use super::CallError;
use super::allocation::{ClaimVersion, Marks};
use super::client::{FIELD_MANAGER, KubeCluster, call};
use super::reader::object;

const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";
/// In front of every message (k8s.io/apimachinery, runtime/serializer/protobuf).
const MAGIC: &[u8] = b"k8s\0";
/// The API server stores no larger objects than etcd takes: 1.5 MiB, before its own limit of 3 MiB per request.
const OBJECT_BYTES_MAX: u64 = 4 << 20;

// Numbers of fields, from the generated.proto of each package: runtime.Unknown, ResourceClaim, meta/v1 ObjectMeta, and
// the entries of a map.
const RAW: u32 = 2;
const METADATA: u32 = 1;
const UID: u32 = 5;
const RESOURCE_VERSION: u32 = 6;
const ANNOTATIONS: u32 = 12;
const FINALIZERS: u32 = 14;
const KEY: u32 = 1;
const VALUE: u32 = 2;

impl KubeCluster {
    /// Writes metadata of a claim, and leaves everything else byte for byte as it is.
    pub(super) async fn mark_verbatim(
        &self,
        at: &ClaimVersion,
        marks: &Marks,
    ) -> Result<ResourceClaim, CallError> {
        let (namespace, name) = (&at.claim.namespace, &at.claim.name);
        let path = format!("{}/{name}", ResourceClaim::url_path(&(), Some(namespace)));
        let what = || format!("GET resourceclaims {namespace}/{name} as protobuf");
        let get = Request::get(&path).header(header::ACCEPT, PROTOBUF).body(Vec::new());
        let read = async {
            let mut stored = Vec::new();
            let body = self.client().request_stream(get.map_err(kube::Error::HttpError)?).await?;
            body.take(OBJECT_BYTES_MAX).read_to_end(&mut stored).await.map_err(kube::Error::ReadEvents)?;
            Ok(stored)
        };
        let stored = call(self.limit(), what, read).await?;
        let marked = marked(&stored, at, marks).map_err(|error| CallError::Unreadable {
            what: what(),
            kind: "ResourceClaim",
            source: Box::new(error),
        })?;
        let what = || format!("PUT resourceclaims {namespace}/{name} as protobuf");
        let Some(body) = marked else {
            return Err(CallError::Conflict {
                what: what(),
                message: "it has another version by now".to_owned(),
            });
        };
        let put = Request::put(format!("{path}?fieldManager={FIELD_MANAGER}"))
            .header(header::CONTENT_TYPE, PROTOBUF)
            .header(header::ACCEPT, "application/json")
            .body(body);
        let write = async { object(&self.client(), put.map_err(kube::Error::HttpError)?).await };
        call(self.limit(), what, write).await
    }
}

/// What the API server sent cannot be read.
#[derive(Debug, Error)]
pub enum NoMessage {
    #[error("it does not begin like a Kubernetes message")]
    Magic,
    #[error("a field extends past the end of its message")]
    Cut,
    #[error(transparent)]
    Field(#[from] DecodeError),
}

/// The stored message with other marks. None: it is another object or version than was meant.
///
/// # Errors
/// The message is none of Kubernetes', or damaged.
pub fn marked(stored: &[u8], at: &ClaimVersion, marks: &Marks) -> Result<Option<Vec<u8>>, NoMessage> {
    let Some(unknown) = stored.strip_prefix(MAGIC) else { return Err(NoMessage::Magic) };
    let unknown = fields(unknown)?;
    let claim = fields(one(&unknown, RAW))?;
    let metadata = fields(one(&claim, METADATA))?;
    let meant = one(&metadata, UID) == at.claim.uid.as_str().as_bytes()
        && one(&metadata, RESOURCE_VERSION) == at.resource_version.as_bytes();
    if !meant {
        return Ok(None);
    }
    let metadata = exchanged(&metadata, marks)?;
    let unknown = with(&unknown, RAW, &with(&claim, METADATA, &metadata));
    Ok(Some([MAGIC, &unknown].concat()))
}

fn exchanged(metadata: &[Field<'_>], marks: &Marks) -> Result<Vec<u8>, NoMessage> {
    let mut left = Vec::new();
    for field in metadata {
        let goes = match field.number {
            FINALIZERS => marks.finalizers.is_some(),
            ANNOTATIONS => {
                let entry = fields(field.value)?;
                marks.annotations.iter().any(|(name, _)| one(&entry, KEY) == name.as_bytes())
            }
            _ => false,
        };
        if !goes {
            left.extend_from_slice(field.whole);
        }
    }
    for finalizer in marks.finalizers.iter().flatten() {
        put(&mut left, FINALIZERS, finalizer.as_bytes());
    }
    for (name, text) in &marks.annotations {
        if let Some(text) = text {
            let mut entry = Vec::new();
            put(&mut entry, KEY, name.as_bytes());
            put(&mut entry, VALUE, text.as_bytes());
            put(&mut left, ANNOTATIONS, &entry);
        }
    }
    Ok(left)
}

/// A field as it stands on the wire.
struct Field<'a> {
    number: u32,
    /// With its key.
    whole: &'a [u8],
    /// Empty if it is no text, bytes or message.
    value: &'a [u8],
}

fn fields(message: &[u8]) -> Result<Vec<Field<'_>>, NoMessage> {
    let (mut found, mut rest) = (Vec::new(), message);
    while rest.has_remaining() {
        let from = rest;
        let (number, kind) = decode_key(&mut rest)?;
        let value = match kind {
            WireType::LengthDelimited => {
                let length = usize::try_from(decode_varint(&mut rest)?).unwrap_or(usize::MAX);
                let Some((value, after)) = rest.split_at_checked(length) else {
                    return Err(NoMessage::Cut);
                };
                rest = after;
                value
            }
            _ => {
                skip_field(kind, number, &mut rest, DecodeContext::default())?;
                &[]
            }
        };
        found.push(Field { number, whole: &from[..from.len() - rest.len()], value });
    }
    Ok(found)
}

/// The value of a field that occurs once; empty if it does not.
fn one<'a>(fields: &[Field<'a>], number: u32) -> &'a [u8] {
    fields.iter().find(|field| field.number == number).map_or(&[], |field| field.value)
}

/// A message with another value of one field.
fn with(fields: &[Field<'_>], number: u32, value: &[u8]) -> Vec<u8> {
    let mut message = Vec::new();
    for field in fields {
        match field.number == number {
            true => put(&mut message, number, value),
            false => message.extend_from_slice(field.whole),
        }
    }
    message
}

fn put(message: &mut Vec<u8>, number: u32, value: &[u8]) {
    encode_key(number, WireType::LengthDelimited, message);
    encode_varint(value.len() as u64, message);
    message.extend_from_slice(value);
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use prost::Message;

    use super::*;
    use crate::model::claim::ClaimRef;

    /// As much of a claim as the API server sends of one, with a spec that must go through untouched.
    #[derive(Clone, PartialEq, Message)]
    struct Claim {
        #[prost(message, optional, tag = "1")]
        metadata: Option<Metadata>,
        #[prost(bytes, tag = "2")]
        spec: Vec<u8>,
    }

    #[derive(Clone, PartialEq, Message)]
    struct Metadata {
        #[prost(string, tag = "1")]
        name: String,
        #[prost(string, tag = "5")]
        uid: String,
        #[prost(string, tag = "6")]
        resource_version: String,
        #[prost(int64, tag = "7")]
        generation: i64,
        #[prost(btree_map = "string, string", tag = "12")]
        annotations: BTreeMap<String, String>,
        #[prost(string, repeated, tag = "14")]
        finalizers: Vec<String>,
        #[prost(bytes, repeated, tag = "17")]
        managed_fields: Vec<Vec<u8>>,
    }

    #[derive(Clone, PartialEq, Message)]
    struct Unknown {
        #[prost(bytes, tag = "1")]
        type_meta: Vec<u8>,
        #[prost(bytes, tag = "2")]
        raw: Vec<u8>,
        #[prost(string, tag = "3")]
        content_encoding: String,
    }

    fn claim() -> Claim {
        let metadata = Metadata {
            name: "train".to_owned(),
            uid: "u-1".to_owned(),
            resource_version: "77".to_owned(),
            generation: 3,
            annotations: [("team".to_owned(), "ml".to_owned()), ("waiting".to_owned(), "old".to_owned())]
                .into(),
            finalizers: vec!["theirs".to_owned()],
            managed_fields: vec![vec![1, 2, 3], vec![4]],
        };
        Claim { metadata: Some(metadata), spec: br#"{"kind": "GpuShare"}"#.to_vec() }
    }

    fn stored(claim: &Claim) -> Vec<u8> {
        let unknown = Unknown { type_meta: vec![9, 9], raw: claim.encode_to_vec(), ..Unknown::default() };
        [MAGIC, &unknown.encode_to_vec()].concat()
    }

    fn at(uid: &str, version: &str) -> ClaimVersion {
        let claim = ClaimRef { namespace: "ml".to_owned(), name: "train".to_owned(), uid: uid.into() };
        ClaimVersion { claim, resource_version: version.to_owned() }
    }

    fn marks() -> Marks {
        let waiting = ("waiting".to_owned(), None);
        let given = ("given-up".to_owned(), Some("77".to_owned()));
        Marks {
            finalizers: Some(vec!["theirs".to_owned(), "ours".to_owned()]),
            annotations: vec![waiting, given],
        }
    }

    #[test]
    fn only_what_is_marked_changes() {
        let message = marked(&stored(&claim()), &at("u-1", "77"), &marks()).unwrap().unwrap();
        let unknown = Unknown::decode(&message[MAGIC.len()..]).unwrap();
        assert_eq!(unknown.type_meta, [9, 9]);
        let mut expected = claim();
        let metadata = expected.metadata.as_mut().unwrap();
        metadata.finalizers.push("ours".to_owned());
        metadata.annotations.remove("waiting");
        metadata.annotations.insert("given-up".to_owned(), "77".to_owned());
        assert_eq!(Claim::decode(&*unknown.raw).unwrap(), expected);
        // Finalizers that nobody speaks of stay.
        let marks = Marks { finalizers: None, ..marks() };
        let message = marked(&stored(&claim()), &at("u-1", "77"), &marks).unwrap().unwrap();
        let unknown = Unknown::decode(&message[MAGIC.len()..]).unwrap();
        assert_eq!(Claim::decode(&*unknown.raw).unwrap().metadata.unwrap().finalizers, ["theirs"]);
    }

    #[test]
    fn another_claim_or_version_is_left_alone() {
        for (uid, version) in [("u-2", "77"), ("u-1", "78"), ("u-1", ""), ("", "")] {
            assert_eq!(
                marked(&stored(&claim()), &at(uid, version), &marks()).unwrap(),
                None,
                "{uid} {version}"
            );
        }
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let whole = stored(&claim());
        for cut in [0, 3, 5, 10, whole.len() - 1] {
            let found = marked(&whole[..cut], &at("u-1", "77"), &marks());
            assert!(!matches!(found, Ok(Some(_))), "{cut} bytes");
        }
        assert!(marked(b"{\"kind\":\"Status\"}", &at("u-1", "77"), &marks()).is_err());
    }
}
