//! The registration service: who we are, and what kubelet made of it. Waits for nothing.

use tokio::sync::watch;
use tonic::{Request, Response, Status};
use tracing::{info, warn};

use super::pb::registration::registration_server::Registration as Service;
use super::pb::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use super::{Error, Sockets};

/// The services on the DRA socket, in the order of our preference: kubelet takes the first of each
/// kind that it knows. The DRA entries are short names, the health entries the services' own.
pub const SUPPORTED_VERSIONS: [&str; 4] =
    ["v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"];

/// What kubelet last said about us.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Registration {
    /// Nothing since the registration socket came up (or came back).
    NotYet,
    Registered,
    /// Kubelet's reason. It tries again by itself as long as the socket is there.
    Refused(String),
}

pub(super) struct Registrar {
    info: PluginInfo,
    state: watch::Sender<Registration>,
}

impl Registrar {
    pub(super) fn new(
        driver: &str,
        sockets: &Sockets,
        state: watch::Sender<Registration>,
    ) -> Result<Self, Error> {
        let endpoint = sockets.dra.to_str().ok_or_else(|| Error::KubeletDir(sockets.dra.clone()))?;
        let info = PluginInfo {
            r#type: "DRAPlugin".to_owned(),
            name: driver.to_owned(),
            endpoint: endpoint.to_owned(),
            supported_versions: SUPPORTED_VERSIONS.map(str::to_owned).to_vec(),
        };
        Ok(Self { info, state })
    }
}

#[tonic::async_trait]
impl Service for Registrar {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(self.info.clone()))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        let state = if status.plugin_registered {
            info!(driver = self.info.name, "kubelet has registered the plugin");
            Registration::Registered
        } else {
            warn!(
                driver = self.info.name,
                reason = status.error,
                "kubelet refuses the plugin; it will try again"
            );
            Registration::Refused(status.error)
        };
        self.state.send_replace(state);
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
