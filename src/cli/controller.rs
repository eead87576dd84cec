//! The controller's process: it places claims, and serves the webhook beside it.

use crate::cluster::webhooks::WebhookApi;
use crate::controller::{self, ControllerError, ProcessContext};
use crate::ops::logs::LogControl;
use crate::webhook::{self, WebhookContext, WebhookMetrics};

use super::settings::ControllerProcess;

/// Runs until told to end.
///
/// # Errors
/// What kept a part from starting, or the first that failed.
pub async fn run(process: ControllerProcess, logs: LogControl) -> Result<(), ControllerError> {
    let ControllerProcess { controller, webhook } = process;
    controller::run(controller, logs, |around| {
        let Some(settings) = webhook else { return Ok(()) };
        let ProcessContext { api, tasks, registry, readiness } = around;
        // Rounds of the controller hold up no request of the API server.
        let thread = tasks.thread("webhook")?;
        let api = {
            let _entered = thread.enter();
            api.with_own_connections()?
        };
        let parts = WebhookContext {
            api: WebhookApi::of(&api),
            metrics: WebhookMetrics::register(registry),
            ready: readiness.wait_for("a certificate that the API server trusts"),
            stop: tasks.stop(),
        };
        tasks.spawn_on(&thread, "webhook", webhook::serve(settings, parts));
        Ok(())
    })
    .await
}
