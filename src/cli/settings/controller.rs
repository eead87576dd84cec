//! How to run the controller.

use std::time::Duration;

use super::{BadSettings, Reader, given, interval};
use crate::admission::ShareClasses;
use crate::cli::args::{ControllerArgs, HoldArgs, KaiArgs, MoveArgs};
use crate::cluster::makers::MakerKind;
use crate::controller::config::{Consolidation, ControllerSettings, Leasing, Mode, Rules};
use crate::controller::holds::HoldPace;
use crate::controller::queue::Patience;
use crate::model::names::{SHARED_CLASS, is_dns_subdomain};
use crate::webhook::WebhookSettings;

/// The controller, and the webhook unless it is switched off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControllerProcess {
    pub controller: ControllerSettings,
    pub webhook: Option<WebhookSettings>,
}

const LEASE: &str = "tranche-controller";
/// Less leaves no time for a write between two signs of life.
const LEASE_MIN: Duration = Duration::from_secs(5);
const LEASE_MAX: Duration = Duration::from_secs(300);

/// # Errors
/// Every mistake in the flags.
pub fn controller(args: ControllerArgs) -> Result<ControllerProcess, BadSettings> {
    let ControllerArgs {
        pod_name,
        pod_namespace,
        deployment,
        lease_name,
        lease_duration,
        ops,
        kubeconfig,
        policy,
        holds,
        mirror_slices,
        pod_templates,
        kai,
        webhook,
        max_overtakes,
        starvation_timeout,
        reservation_duration,
        grouping_schedulers,
        preemption,
        moves,
    } = args;
    let mut reader = Reader::default();
    let duration = reader.parsed("--lease-duration", lease_duration, Leasing::DURATION, lease_time);
    let usual = Rules::default();
    let namespace = reader.required("--pod-namespace", pod_namespace, "metadata.namespace");
    let webhook = reader.webhook(webhook, &namespace);
    let controller = ControllerSettings {
        identity: reader.required("--pod-name", pod_name, "metadata.name"),
        namespace,
        deployment: given(deployment),
        lease: Leasing {
            name: given(lease_name).unwrap_or_else(|| LEASE.to_owned()),
            duration,
            renew_every: duration / 5,
        },
        kubeconfig: given(kubeconfig).map(|path| reader.path("--kubeconfig", Some(path), "")),
        ops_address: reader.ops(ops),
        mirror: reader.parsed("--mirror-slices", mirror_slices, false, yes_or_no),
        share_classes: reader.share_classes(kai),
        makers: reader.parsed("--pod-templates", pod_templates, vec![jobs()], maker_kinds),
        rules: Rules {
            policy: reader.parsed("--policy", policy, usual.policy, str::parse),
            never_hold: reader.gpus("--never-hold", &holds.never_hold),
            always_hold: reader.gpus("--always-hold", &holds.always_hold),
            grouping_schedulers: schedulers(grouping_schedulers, usual.grouping_schedulers),
            preemption: reader.parsed("--preemption", preemption, usual.preemption, yes_or_no),
            holds: reader.holds(holds),
            consolidation: reader.moves(moves),
            patience: Patience {
                passes: reader.parsed("--max-overtakes", max_overtakes, usual.patience.passes, count),
                time: reader.parsed(
                    "--starvation-timeout",
                    starvation_timeout,
                    usual.patience.time,
                    interval,
                ),
                keep: reader.parsed(
                    "--reservation-duration",
                    reservation_duration,
                    usual.patience.keep,
                    interval,
                ),
            },
            ..usual
        },
    };
    reader.finish(ControllerProcess { controller, webhook })
}

fn schedulers(text: Option<String>, usual: Vec<String>) -> Vec<String> {
    match given(text) {
        None => usual,
        Some(text) if text == "none" => Vec::new(),
        Some(text) => list(&text),
    }
}

impl Reader {
    fn required(&mut self, flag: &'static str, value: Option<String>, field: &str) -> String {
        let name = given(value).unwrap_or_default();
        if name.is_empty() {
            self.mistake(flag, format!("is required; in a pod take it from {field}"));
        } else if !is_dns_subdomain(&name) {
            self.mistake(flag, format!("{name:?} is not a valid object name"));
        }
        name
    }

    fn gpus(&mut self, flag: &'static str, value: &Option<String>) -> Vec<String> {
        self.parsed(flag, value.clone(), Vec::new(), |text| Ok(list(text)))
    }

    fn holds(&mut self, args: HoldArgs) -> HoldPace {
        let HoldArgs { hold_settle_duration, keep_warm, hold_ahead, never_hold: _, always_hold: _ } = args;
        let usual = HoldPace::default();
        HoldPace {
            settle: self.parsed("--hold-settle-duration", hold_settle_duration, usual.settle, interval),
            keep_warm: self.parsed("--keep-warm", keep_warm, usual.keep_warm, interval),
            ahead: self.parsed("--hold-ahead", hold_ahead, usual.ahead, |text| {
                count(text).map(|count| usize::try_from(count).unwrap_or(usize::MAX))
            }),
            ..usual
        }
    }
}

impl Reader {
    fn share_classes(&mut self, args: KaiArgs) -> ShareClasses {
        let mut class =
            |flag, value| self.parsed(flag, value, SHARED_CLASS.to_owned(), ShareClasses::checked);
        let memory = class("--kai-memory-class", args.kai_memory_class);
        ShareClasses::new(memory, class("--kai-fraction-class", args.kai_fraction_class))
    }

    fn moves(&mut self, args: MoveArgs) -> Consolidation {
        let usual = Consolidation::default();
        Consolidation {
            mode: self.parsed("--consolidation", args.consolidation, usual.mode, mode_of),
            per_hour: self.parsed("--moves-per-hour", args.moves_per_hour, usual.per_hour, count),
            rest: self.parsed("--move-rest", args.move_rest, usual.rest, interval),
        }
    }
}

fn mode_of(text: &str) -> Result<Mode, String> {
    match text {
        "off" => Ok(Mode::Off),
        "propose" => Ok(Mode::Propose),
        "auto" => Ok(Mode::Auto),
        _ => Err(format!("{text:?} is not known; write off, propose or auto")),
    }
}

pub(super) fn lease_time(text: &str) -> Result<Duration, String> {
    let parsed = interval(text)?;
    match (LEASE_MIN..=LEASE_MAX).contains(&parsed) && parsed.subsec_nanos() == 0 {
        true => Ok(parsed),
        false => Err(format!("{text:?} is out of range; write whole seconds from 5s to 5m")),
    }
}

fn jobs() -> MakerKind {
    let [group, version, plural, kind] = ["batch", "v1", "jobs", "Job"].map(str::to_owned);
    MakerKind { group, version, plural, kind }
}

/// `none`, or kinds of objects.
fn maker_kinds(text: &str) -> Result<Vec<MakerKind>, String> {
    let one = |text: String| match text.split('/').collect::<Vec<_>>()[..] {
        [group, version, plural, kind] if ![group, version, plural, kind].contains(&"") => {
            let [group, version, plural, kind] = [group, version, plural, kind].map(str::to_owned);
            Ok(MakerKind { group, version, plural, kind })
        }
        _ => Err(format!(
            "{text:?} is no kind of object; write group/version/plural/Kind, such as batch/v1/jobs/Job"
        )),
    };
    if text == "none" { Ok(Vec::new()) } else { list(text).into_iter().map(one).collect() }
}

fn yes_or_no(text: &str) -> Result<bool, String> {
    text.parse().map_err(|_| format!("{text:?} is not known; write true or false"))
}

fn count(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| format!("{text:?} is not a valid count; write a whole number"))
}

fn list(text: &str) -> Vec<String> {
    text.split(',').map(|one| one.trim().to_owned()).filter(|one| !one.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allocate::Policy;

    fn named() -> ControllerArgs {
        ControllerArgs {
            pod_name: Some("tranche-controller-x".to_owned()),
            pod_namespace: Some("tranche-system".to_owned()),
            ..ControllerArgs::default()
        }
    }

    #[test]
    fn a_pods_name_and_namespace_are_enough() {
        let settings = controller(named()).unwrap().controller;
        assert_eq!(settings.lease.name, "tranche-controller");
        assert_eq!((settings.lease.duration, settings.lease.renew_every.as_secs()), (Leasing::DURATION, 2));
        assert_eq!((settings.rules, settings.makers), (Rules::default(), vec![jobs()]));
        assert_eq!(settings.share_classes, ShareClasses::default());
        let off = ControllerArgs { pod_templates: Some("none".to_owned()), ..named() };
        assert_eq!(controller(off).unwrap().controller.makers, []);
    }

    #[test]
    fn every_flag_is_heard_and_all_mistakes_are_told() {
        let mut args = named();
        args.policy = Some("spread".to_owned());
        args.mirror_slices = Some("true".to_owned());
        args.preemption = Some("false".to_owned());
        args.pod_templates = Some("example.com/v1/trains/Train".to_owned());
        args.kai.kai_memory_class = Some("gib.example.com".to_owned());
        args.holds.never_hold = Some("node-a, T4 ,".to_owned());
        args.holds.always_hold = Some("GPU-1".to_owned());
        args.holds.hold_ahead = Some("2".to_owned());
        args.reservation_duration = Some("90s".to_owned());
        args.grouping_schedulers = Some("volcano, batch".to_owned());
        args.moves.consolidation = Some("auto".to_owned());
        args.moves.moves_per_hour = Some("3".to_owned());
        args.moves.move_rest = Some("1h".to_owned());
        let ControllerSettings { rules, mirror, makers, share_classes, .. } =
            controller(args).unwrap().controller;
        assert_eq!(share_classes, ShareClasses::new("gib.example.com".to_owned(), SHARED_CLASS.to_owned()));
        assert!(mirror && !rules.preemption);
        assert_eq!(
            (makers[0].group.as_str(), makers[0].kind.as_str(), makers.len()),
            ("example.com", "Train", 1)
        );
        assert_eq!(rules.patience, Patience { keep: Duration::from_secs(90), ..Patience::default() });
        assert_eq!((rules.policy, rules.holds.ahead), (Policy::Spread, 2));
        assert_eq!(rules.grouping_schedulers, ["volcano", "batch"]);
        let rest = Duration::from_secs(3600);
        assert_eq!(rules.consolidation, Consolidation { mode: Mode::Auto, per_hour: 3, rest });
        assert_eq!(
            (rules.never_hold, rules.always_hold),
            (vec!["node-a".into(), "T4".into()], vec!["GPU-1".into()])
        );
        let mut bad = ControllerArgs {
            lease_duration: Some("1s".to_owned()),
            policy: Some("best".to_owned()),
            max_overtakes: Some("-1".to_owned()),
            mirror_slices: Some("yes".to_owned()),
            pod_templates: Some("jobs".to_owned()),
            ..ControllerArgs::default()
        };
        bad.holds.hold_settle_duration = Some("soon".to_owned());
        bad.kai.kai_memory_class = Some("gpu.nvidia.com".to_owned());
        bad.kai.kai_fraction_class = Some("Team A".to_owned());
        bad.moves.consolidation = Some("always".to_owned());
        let words = controller(bad).unwrap_err().to_string();
        for part in [
            "11 to change",
            "--kai-memory-class (or TRANCHE_KAI_MEMORY_CLASS): DeviceClass gpu.nvidia.com is kube-scheduler's",
            "--kai-fraction-class (or TRANCHE_KAI_FRACTION_CLASS): \"Team A\" is not a valid name",
            "off, propose or auto",
            "batch/v1/jobs/Job",
            "--mirror-slices",
            "--pod-name",
            "--pod-namespace",
            "5s to 5m",
            "fragmentation",
            "--max-overtakes",
            "--hold-settle-duration",
        ] {
            assert!(words.contains(part), "{part} is missing from\n{words}");
        }
    }
}
