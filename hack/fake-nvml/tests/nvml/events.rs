//! Events.

use std::time::{Duration, Instant};

use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;

use crate::rig::Rig;

#[test]
fn an_event_wakes_the_one_who_waits() {
    let rig = Rig::new(r#"{"profile":"h100","count":2,"events":[{"seq":4,"gpu":1,"value":31}]}"#);
    let nvml = rig.nvml();
    let set = nvml.create_event_set().expect("set");
    let gpu = nvml.device_by_index(1).expect("gpu");
    let set =
        gpu.register_events(EventTypes::CRITICAL_XID_ERROR, set).map_err(|e| e.error).expect("registered");
    assert!(matches!(set.wait(20), Err(NvmlError::Timeout)), "what was before does not count");

    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            rig.cli(&["xid", "0", "13"]);
            rig.cli(&["xid", "1", "79"]);
        });
        let started = Instant::now();
        let event = set.wait(10_000).expect("an event");
        assert!(started.elapsed() < Duration::from_secs(5));
        assert_eq!(event.device.index().expect("index"), 1, "board 0 is not listened to");
        assert!(matches!(event.event_data, Some(XidError::Value(79))));
    });
    assert!(matches!(set.wait(20), Err(NvmlError::Timeout)), "once only");

    rig.cli(&["lose", "1"]);
    assert!(matches!(set.wait(20), Err(NvmlError::GpuLost)));
}

#[test]
fn only_what_a_board_supports() {
    let rig = Rig::new(r#"{"profile":"t4"}"#);
    let nvml = rig.nvml();
    let gpu = nvml.device_by_index(0).expect("gpu");
    let supported = gpu.supported_event_types().expect("types");
    assert!(supported.contains(EventTypes::CRITICAL_XID_ERROR));
    let set = nvml.create_event_set().expect("set");
    let sys = rig.sys();
    // SAFETY: live handles.
    let code = unsafe { sys.nvmlDeviceRegisterEvents(gpu.handle(), 1 << 60, set.handle()) };
    assert_eq!(code, 3);
    set.release_events().expect("freed");
}
