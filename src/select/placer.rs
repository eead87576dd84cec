//! Who places claims of a DeviceClass: kube-scheduler, or our controller. A class is the controller's if one of its
//! selectors is [`NOT_FOR_THE_SCHEDULER`], which no device of any node fulfils: kube-scheduler never finds any for such a
//! class, so that no class is placed by both.

use k8s_openapi::api::resource::v1::DeviceClass;

use crate::model::names::SHARED_CLASS;

/// The selector that keeps kube-scheduler away from a class. It stands by itself in the list of selectors, all of which
/// must hold. The driver is tested first: devices of other drivers lack the attribute, which would be an error.
pub const NOT_FOR_THE_SCHEDULER: &str =
    "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'placed-by-controller'";
/// The type that this selector asks for. No GPU has it. What nobody writes into a selector for another purpose.
pub const TYPE_OF_SHARES: &str = "placed-by-controller";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placer {
    Controller,
    Scheduler,
    /// kube-scheduler, though a selector names the type by which classes are the controller's: maybe meant so.
    Doubtful,
}

/// Who places claims of the class.
pub fn placer(class: &DeviceClass) -> Placer {
    let mut texts = texts(class);
    // The shipped class is the controller's whatever becomes of it.
    if class.metadata.name.as_deref() == Some(SHARED_CLASS) || texts.clone().any(is_mark) {
        Placer::Controller
    } else if texts.any(|text| text.contains(TYPE_OF_SHARES)) {
        Placer::Doubtful
    } else {
        Placer::Scheduler
    }
}

/// The selectors of a class, without the one that keeps kube-scheduler away.
pub fn chosen_by(class: &DeviceClass) -> Vec<String> {
    texts(class).filter(|text| !is_mark(text)).map(str::to_owned).collect()
}

fn texts(class: &DeviceClass) -> impl Iterator<Item = &str> + Clone {
    let selectors = class.spec.iter().flat_map(|spec| spec.selectors.iter().flatten());
    selectors.filter_map(|one| Some(one.cel.as_ref()?.expression.as_str()))
}

/// Spaces, line breaks and the kind of quotes do not matter. Whatever they change within the quotes, no device has it.
fn is_mark(text: &str) -> bool {
    let plain = |text: &str| -> String {
        text.chars().filter(|c| !c.is_whitespace()).map(|c| if c == '"' { '\'' } else { c }).collect()
    };
    plain(text) == plain(NOT_FOR_THE_SCHEDULER)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn class(name: &str, selectors: &[&str]) -> DeviceClass {
        let selectors: Vec<_> = selectors.iter().map(|text| json!({"cel": {"expression": text}})).collect();
        serde_json::from_value(json!({"metadata": {"name": name}, "spec": {"selectors": selectors}})).unwrap()
    }

    #[test]
    fn a_class_is_the_controllers_by_a_selector_of_its_own_that_no_device_fulfils() {
        let h100 = "device.attributes['gpu.nvidia.com'].productName.contains('H100')";
        let folded = NOT_FOR_THE_SCHEDULER.replace("&&", "&&\n  ").replace('\'', "\"");
        for (selectors, who) in [
            (&[NOT_FOR_THE_SCHEDULER][..], Placer::Controller),
            (&[h100, &folded], Placer::Controller),
            (&[h100], Placer::Scheduler),
            (&[], Placer::Scheduler),
            // kube-scheduler may find a device for these.
            (&[&format!("{NOT_FOR_THE_SCHEDULER} || true")], Placer::Doubtful),
            (&[&format!("!({NOT_FOR_THE_SCHEDULER})")], Placer::Doubtful),
            (&["device.attributes['gpu.nvidia.com'].type == 'placed-by-controller'"], Placer::Doubtful),
        ] {
            assert_eq!(placer(&class("team-a", selectors)), who, "{selectors:?}");
        }
        assert_eq!(placer(&class(SHARED_CLASS, &[])), Placer::Controller);
        assert_eq!(chosen_by(&class("team-a", &[h100, &folded])), [h100]);
    }
}
