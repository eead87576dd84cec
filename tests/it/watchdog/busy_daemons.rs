//! More MPS daemons that do not answer than are asked at a time.

use std::collections::BTreeSet;
use std::sync::Condvar;

use super::*;

/// As many are asked at a time.
const PLACES: usize = 16;

/// The daemons that were asked, in order. The first answer once the gate is open.
#[derive(Default)]
struct Busy {
    asked: Mutex<Vec<MpsGroup>>,
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl Busy {
    fn answer(&self, group: &MpsGroup) {
        self.asked.lock().unwrap().push(group.clone());
        let (is_open, waits) = (self.is_open.lock().unwrap(), |is_open: &mut bool| !*is_open);
        drop(self.opened.wait_timeout_while(is_open, PATIENCE, waits).unwrap());
    }

    fn open(&self) {
        *self.is_open.lock().unwrap() = true;
        self.opened.notify_all();
    }

    fn asked(&self) -> BTreeSet<MpsGroup> {
        self.asked.lock().unwrap().iter().cloned().collect()
    }
}

/// The question that found no place counted as the daemon's silence, for which a process is ended.
#[tokio::test]
async fn a_daemon_that_cannot_be_asked_because_others_are_busy_has_its_turn_later() {
    let mut bench = Bench::new();
    let busy = Arc::new(Busy::default());
    let its = busy.clone();
    let answers = move |group: &MpsGroup| {
        its.answer(group);
        Vec::new()
    };
    bench.daemons.told().answers = Some(Arc::new(answers));
    let mut sleepers = Vec::new();
    for number in 0..=PLACES {
        let pod = format!("11111111-0000-4000-8000-{number:012}");
        let sleeper = Sleeper::new();
        bench.proc.show(sleeper.pid(), Some(&pod));
        bench.own_share(&format!("c{number:02}"), &pod).await;
        sleepers.push(sleeper);
    }
    let list = sleepers.iter().map(|sleeper| process(sleeper.pid(), 100, "compute"));
    bench.node.set(control(list.collect()));
    bench.start(WatchdogAction::Observe);
    until("as many are asked as may", || busy.asked().len() == PLACES).await;
    let postponed = |bench: &Bench| bench.metric("tranche_watchdog_postponed_questions_total");
    until("one waits", || postponed(&bench) == Some(1.0)).await;
    bench.wait_for_looks(5).await;
    assert_eq!(
        (busy.asked().len(), postponed(&bench)),
        (PLACES, Some(1.0)),
        "it waits on, and is counted once"
    );
    busy.open();
    until("it has its turn", || busy.asked().len() == PLACES + 1).await;
    assert_eq!(bench.metric("tranche_watchdog_failed_questions_total"), Some(0.0));
}
