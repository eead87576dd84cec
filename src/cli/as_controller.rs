//! Flags of tools that decide by the controller's own code: what the controller was told.

use clap::Args;

use crate::admission::ShareClasses;
use crate::controller::config::Rules;
use crate::controller::core::Core;
use crate::model::names::SHARED_CLASS;

#[derive(Debug, Clone, Args)]
pub struct AsControllerArgs {
    /// The controller's --policy, if that is another one.
    #[arg(long, default_value = "pack", value_parser = ["pack", "spread", "fragmentation"])]
    pub policy: String,
    /// The controller's --never-hold, if it has one.
    #[arg(long, value_name = "LIST")]
    pub never_hold: Option<String>,
    /// The controller's --kai-memory-class, if that is another one.
    #[arg(long, value_name = "CLASS", value_parser = ShareClasses::checked, default_value = SHARED_CLASS)]
    pub kai_memory_class: String,
    /// The controller's --kai-fraction-class, if that is another one.
    #[arg(long, value_name = "CLASS", value_parser = ShareClasses::checked, default_value = SHARED_CLASS)]
    pub kai_fraction_class: String,
    /// Where the controller runs: its lease and the claims with which it takes GPUs.
    #[arg(long, value_name = "NAMESPACE", default_value = "tranche-system")]
    pub controller_namespace: String,
}

impl AsControllerArgs {
    pub fn share_classes(&self) -> ShareClasses {
        ShareClasses::new(self.kai_memory_class.clone(), self.kai_fraction_class.clone())
    }

    /// What is known of nothing yet, as the controller begins. `rules`: with what else the tool was told.
    pub fn core(&self, rules: Rules) -> Core {
        Core::new(rules, &self.controller_namespace).promising(self.share_classes())
    }

    /// The rest is as usual.
    pub fn rules(&self) -> Rules {
        let usual = Rules::default();
        let never = self.never_hold.iter().flat_map(|list| list.split(',')).map(str::trim);
        Rules {
            policy: self.policy.parse().unwrap_or(usual.policy),
            never_hold: never.filter(|one| !one.is_empty()).map(str::to_owned).collect(),
            ..usual
        }
    }
}
