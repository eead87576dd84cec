//! Asks beside the looks what is not known.

use tracing::{info, warn};

use super::act;
use super::knowledge::ClaimUsers;
use super::{TaskResult, Watchdog};
use crate::cluster::{ClaimError, Cluster};
use crate::model::claim::ClaimRef;
use crate::model::error_chain;
use crate::model::time::Moment;

impl Watchdog {
    /// Starts the questions whose turn it is.
    pub(super) fn ask(&mut self, now: Moment) {
        let questions = self.knowledge.questions(self.devices.values(), now);
        for claim in questions.claims {
            let cluster = self.parts.cluster.clone();
            self.tasks.spawn(async move {
                let users = users(&*cluster, &claim).await;
                TaskResult::Users { claim: claim.uid, asked: now, users }
            });
        }
        let threads = &self.threads;
        if questions.ledger {
            let (requester, executor) = (threads.requester.clone(), self.parts.executor.clone());
            self.tasks.spawn(async move {
                let read = requester.run(move || executor.store.read_again()).await;
                TaskResult::Ledger { asked: now, read: read.and_then(in_words) }
            });
        }
        if questions.servers {
            let (daemons, processes) = (self.parts.daemons.clone(), self.parts.processes.clone());
            let requester = threads.requester.clone();
            self.tasks.spawn(async move {
                let servers = requester.run(move || act::servers(&*daemons, &*processes)).await;
                TaskResult::Servers { asked: now, servers: servers.and_then(in_words) }
            });
        }
        self.ask_daemons(now);
    }

    /// Asks daemons for their clients, whoever has waited longest first, as far as there are threads for it.
    fn ask_daemons(&mut self, now: Moment) {
        let due = self.detours.due(now);
        for (at, group) in due.iter().enumerate() {
            let Ok(clients) = self.threads.clients(group.clone(), self.parts.daemons.clone()) else {
                let postponed = self.detours.postpone(&due[at..], now);
                self.parts.metrics.postponed_questions.inc_by(postponed);
                return;
            };
            self.detours.put(group, now);
            let group = group.clone();
            self.tasks
                .spawn(async move { TaskResult::Clients { group, asked: now, clients: clients.await } });
        }
    }

    /// The answer, if there is one. That there is none is told when it begins and when it ends.
    pub(super) fn answer<T>(&mut self, of: &'static str, answer: Result<T, String>) -> Option<T> {
        match answer {
            Ok(answer) => {
                if self.logged_failures.questions.remove(of) {
                    info!(of, "the watchdog's questions are answered again");
                }
                Some(answer)
            }
            Err(problem) => {
                self.parts.metrics.failed_questions.inc();
                if self.logged_failures.questions.insert(of) {
                    warn!(
                        of,
                        problem,
                        "a question of the watchdog is not answered; asked again, and until it is, no process is \
                         found to be of no claim"
                    );
                }
                None
            }
        }
    }
}

fn in_words<T>(answer: Result<T, impl std::error::Error>) -> Result<T, String> {
    answer.map_err(|error| error_chain(&error))
}

/// Who may use a claim; none if the API server's answer, or its silence, tells nothing.
async fn users(cluster: &dyn Cluster, claim: &ClaimRef) -> Option<ClaimUsers> {
    match cluster.claim(claim).await {
        Ok(found) => Some(ClaimUsers { pods: found.pods, others: found.reserved_for_others }),
        Err(ClaimError::Malformed { .. } | ClaimError::Call { .. }) => None,
        // It is nobody's any more.
        Err(_) => Some(ClaimUsers::default()),
    }
}
