//! Kubelet's calls on the DRA socket, timed.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use futures::future::try_join_all;

use tranche::kubelet::pb::dra::Claim;
use tranche::model::names::DRIVER;

use crate::api::PATIENCE;
use crate::fake_kubelet::{self, FakeKubelet};

/// A registered plugin, as kubelet has it.
#[derive(Clone)]
pub struct Socket(fake_kubelet::Plugin);

impl Socket {
    /// Waits until the plugin is registered.
    pub async fn registered(kubelet: &FakeKubelet) -> Result<Self> {
        let plugin = tokio::time::timeout(PATIENCE, kubelet.registered(DRIVER)).await;
        Ok(Self(plugin.context("never registered")?))
    }

    /// Opens the health stream, as kubelet does, and reads it for as long as it goes.
    pub async fn watch_health(&self) -> Result<()> {
        let mut stream = self.0.watch_health().await?;
        tokio::spawn(async move { while let Ok(Some(_)) = stream.message().await {} });
        Ok(())
    }

    /// One call with one claim.
    pub async fn prepare(&self, claim: &Claim) -> Result<Duration> {
        let (asked, begun) = (vec![claim.clone()], Instant::now());
        let answer = self.0.prepare(asked).await?;
        let took = begun.elapsed();
        match answer.claims.get(&claim.uid) {
            Some(answer) if answer.error.is_empty() && answer.devices.len() == 1 => Ok(took),
            other => bail!("claim {} is not prepared: {other:?}", claim.name),
        }
    }

    /// One call with one claim.
    pub async fn unprepare(&self, claim: &Claim) -> Result<Duration> {
        let (asked, begun) = (vec![claim.clone()], Instant::now());
        let answer = self.0.unprepare(asked).await?;
        let took = begun.elapsed();
        match answer.claims.get(&claim.uid) {
            Some(answer) if answer.error.is_empty() => Ok(took),
            other => bail!("claim {} is not released: {other:?}", claim.name),
        }
    }

    /// One call per claim, all at once: each claim's time from the moment in which all were sent.
    pub async fn prepare_all(&self, claims: &[Claim]) -> Result<Vec<Duration>> {
        try_join_all(claims.iter().map(|claim| self.prepare(claim))).await
    }

    pub async fn unprepare_all(&self, claims: &[Claim]) -> Result<Vec<Duration>> {
        try_join_all(claims.iter().map(|claim| self.unprepare(claim))).await
    }
}
