//! The health stream, v1 and v1alpha1 over one implementation (KEP-4680).
//!
//! Each message lists every device: kubelet turns one that is left out to Unknown when its time is up.

use std::pin::Pin;
use std::time::Duration;

use futures::{Stream, stream};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::pb::health::dra_resource_health_server::DraResourceHealth as V1;
use super::pb::health::{
    DeviceHealth as Reported, DeviceIdentifier, HealthStatus, NodeWatchResourcesRequest,
    NodeWatchResourcesResponse,
};
use super::pb::health_v1alpha1::dra_resource_health_server::DraResourceHealth as V1alpha1;
use super::{DeviceHealth, Health};

/// Bytes of a device's message: what the API takes.
pub const MAX_MESSAGE: usize = 1024;

/// Seconds without news after which kubelet shows Unknown: its own default, three of our messages.
const TIMEOUT_SECONDS: i64 = 30;

type Messages = Pin<Box<dyn Stream<Item = Result<NodeWatchResourcesResponse, Status>> + Send>>;

#[derive(Clone)]
pub(super) struct HealthStream {
    health: Health,
    /// The longest silence.
    resend: Duration,
    stop: CancellationToken,
}

impl HealthStream {
    pub(super) fn new(health: Health, resend: Duration, stop: CancellationToken) -> Self {
        Self { health, resend, stop }
    }

    fn watch(&self) -> Response<Messages> {
        let mut watcher = self.clone();
        watcher.health.devices.mark_changed();
        Response::new(Box::pin(stream::unfold(watcher, |mut watcher| async move {
            let message = watcher.next().await?;
            Some((Ok(message), watcher))
        })))
    }

    /// The next message: on a change, or to refresh the last one. None when there will be no more.
    async fn next(&mut self) -> Option<NodeWatchResourcesResponse> {
        tokio::select! {
            () = self.stop.cancelled() => return None,
            changed = self.health.devices.changed() => changed.ok()?,
            () = sleep(self.resend) => {}
        }
        let seconds = self.seconds();
        let devices = self.health.devices.borrow_and_update();
        Some(NodeWatchResourcesResponse {
            devices: devices.iter().map(|device| reported(device, seconds)).collect(),
        })
    }

    fn seconds(&self) -> i64 {
        (self.health.clock)().as_second()
    }
}

fn reported(device: &DeviceHealth, seconds: i64) -> Reported {
    let (health, message) = match &device.state {
        Ok(()) => (HealthStatus::Healthy, ""),
        Err(reason) => (HealthStatus::Unhealthy, truncated(reason)),
    };
    Reported {
        device: Some(DeviceIdentifier {
            pool_name: device.pool.to_string(),
            device_name: device.device.to_string(),
        }),
        health: health.into(),
        last_updated_time: seconds,
        health_check_timeout_seconds: TIMEOUT_SECONDS,
        message: message.to_owned(),
    }
}

/// At most [`MAX_MESSAGE`] bytes, cut between characters.
fn truncated(message: &str) -> &str {
    &message[..message.floor_char_boundary(MAX_MESSAGE)]
}

#[tonic::async_trait]
impl V1 for HealthStream {
    type NodeWatchResourcesStream = Messages;

    async fn node_watch_resources(
        &self,
        _: Request<NodeWatchResourcesRequest>,
    ) -> Result<Response<Messages>, Status> {
        Ok(self.watch())
    }
}

#[tonic::async_trait]
impl V1alpha1 for HealthStream {
    type NodeWatchResourcesStream = Messages;

    async fn node_watch_resources(
        &self,
        _: Request<NodeWatchResourcesRequest>,
    ) -> Result<Response<Messages>, Status> {
        Ok(self.watch())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::StreamExt;
    use jiff::Timestamp;
    use std::sync::Arc;
    use tokio::sync::watch;
    use tokio::time::Instant;

    fn device(name: &str, state: Result<(), String>) -> DeviceHealth {
        DeviceHealth { pool: "node-a".into(), device: name.into(), state }
    }

    struct Bench {
        devices: watch::Sender<Vec<DeviceHealth>>,
        stop: CancellationToken,
        messages: Messages,
    }

    fn bench(first: Vec<DeviceHealth>) -> Bench {
        let (devices, receiver) = watch::channel(first);
        let clock = Arc::new(|| Timestamp::UNIX_EPOCH + Duration::from_secs(1_800_000_000));
        let stop = CancellationToken::new();
        let health = Health { devices: receiver, clock };
        let messages = HealthStream::new(health, Duration::from_secs(10), stop.clone()).watch().into_inner();
        Bench { devices, stop, messages }
    }

    #[test]
    fn long_messages_are_cut_between_characters() {
        assert_eq!(truncated("short"), "short");
        assert_eq!(truncated(""), "");
        assert_eq!(truncated(&"x".repeat(MAX_MESSAGE)).len(), MAX_MESSAGE);
        assert_eq!(truncated(&"x".repeat(MAX_MESSAGE + 1)).len(), MAX_MESSAGE);
        assert_eq!(truncated(&"€".repeat(600)).len(), MAX_MESSAGE - 1);
    }

    #[tokio::test(start_paused = true)]
    async fn the_complete_set_comes_at_once_on_change_and_every_ten_seconds() {
        let mut bench = bench(vec![device("gpu-0", Ok(())), device("gpu-1", Ok(()))]);
        let began = Instant::now();
        let first = bench.messages.next().await.unwrap().unwrap();
        assert_eq!(began.elapsed(), Duration::ZERO);
        assert_eq!(first.devices.len(), 2);
        assert!(first.devices.iter().all(|d| d.health() == HealthStatus::Healthy && d.message.is_empty()));
        assert!(first.devices.iter().all(|d| d.last_updated_time == 1_800_000_000));

        let refresh = bench.messages.next().await.unwrap().unwrap();
        assert_eq!(began.elapsed(), Duration::from_secs(10));
        assert_eq!(refresh.devices.len(), 2, "a device left out turns Unknown");

        bench.devices.send_replace(vec![device("gpu-0", Err("XID 79".into())), device("gpu-1", Ok(()))]);
        let changed = bench.messages.next().await.unwrap().unwrap();
        assert_eq!(began.elapsed(), Duration::from_secs(10), "a change does not wait");
        assert_eq!(changed.devices.len(), 2);
        assert_eq!(changed.devices[0].health(), HealthStatus::Unhealthy);
        assert_eq!(changed.devices[0].message, "XID 79");
    }

    #[tokio::test(start_paused = true)]
    async fn the_stream_ends_on_stop_and_when_nobody_watches_the_devices() {
        let mut stopped = bench(vec![]);
        stopped.messages.next().await.unwrap().unwrap();
        stopped.stop.cancel();
        assert!(stopped.messages.next().await.is_none());

        let mut orphaned = bench(vec![]);
        drop(orphaned.devices);
        // What was last known is told, then the stream ends rather than refresh stale news.
        assert!(orphaned.messages.next().await.unwrap().is_ok());
        assert!(orphaned.messages.next().await.is_none());
    }
}
