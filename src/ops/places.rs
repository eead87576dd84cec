//! Room for connections on a door that anybody may knock at. Nobody is kept waiting: when the room is full, whoever
//! has most of it gives some of it back. A flood from one address costs that address, and one connection that does
//! its work at once is served whatever idles beside it.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// Whoever speaks to us in earnest has sent his request by then; a later one may be ended for a newcomer of his own.
const PROMPT: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Connections of everybody together.
    pub all: usize,
    /// Connections of one address.
    pub per_peer: usize,
    /// What all requests that are being received may hold together.
    pub bytes: usize,
}

/// Clones are the same room.
#[derive(Debug, Clone)]
pub struct Places(Arc<Room>);

#[derive(Debug)]
struct Room {
    limits: Limits,
    guests: Mutex<Guests>,
    /// Bytes were given back.
    freed: Notify,
}

/// By the order in which they came.
#[derive(Debug, Default)]
struct Guests {
    next: u64,
    open: BTreeMap<u64, Guest>,
    dropped: u64,
}

#[derive(Debug)]
struct Guest {
    peer: IpAddr,
    phase: Phase,
    since: Instant,
    bytes: usize,
    leave: Arc<Notify>,
    /// It was told to, and is not gone yet.
    leaving: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Between requests, or before the first.
    Waiting,
    /// A request is coming in.
    Receiving,
    /// It is there and is being answered: not to be ended for anybody.
    Answering,
}

/// One connection's place, free again when it is dropped.
#[derive(Debug)]
pub struct Place {
    room: Arc<Room>,
    id: u64,
    leave: Arc<Notify>,
}

impl Places {
    pub fn new(limits: Limits) -> Self {
        Self(Arc::new(Room { limits, guests: Mutex::default(), freed: Notify::new() }))
    }

    /// A place for a connection from there. None: all that this address has is at work; close the connection.
    pub fn enter(&self, peer: IpAddr) -> Option<Place> {
        let (peer, limits) = (network(peer), self.0.limits);
        let mut guests = self.0.lock();
        // Those that were told to go need their turn to do so.
        let leaving = guests.open.values().filter(|guest| guest.leaving).count();
        if leaving > limits.all || !guests.make_room(peer, limits) {
            guests.dropped += 1;
            return None;
        }
        let (id, leave) = (guests.next, Arc::new(Notify::new()));
        guests.next += 1;
        let guest = Guest {
            peer,
            phase: Phase::Waiting,
            since: Instant::now(),
            bytes: 0,
            leave: leave.clone(),
            leaving: false,
        };
        guests.open.insert(id, guest);
        Some(Place { room: self.0.clone(), id, leave })
    }

    /// Connections that were ended or not let in for want of room, since this was asked last.
    pub fn take_dropped(&self) -> u64 {
        std::mem::take(&mut self.0.lock().dropped)
    }
}

impl Room {
    fn lock(&self) -> MutexGuard<'_, Guests> {
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Guests {
    fn staying(&self) -> impl Iterator<Item = (&u64, &Guest)> {
        self.open.iter().filter(|(_, guest)| !guest.leaving)
    }

    fn make_room(&mut self, peer: IpAddr, limits: Limits) -> bool {
        // Address, how many it has, and its first: the newcomer counts with his address.
        let mut peers: HashMap<IpAddr, (usize, u64)> = HashMap::new();
        let mut all = 0;
        for (id, guest) in self.staying() {
            peers.entry(guest.peer).or_insert((0, *id)).0 += 1;
            all += 1;
        }
        let own = peers.entry(peer).or_insert((0, u64::MAX));
        own.0 += 1;
        let heaviest = match own.0 > limits.per_peer {
            true => Some(peer),
            false if all < limits.all => None,
            false => {
                let most = peers.iter().max_by_key(|(_, (count, first))| (*count, std::cmp::Reverse(*first)));
                most.map(|(peer, _)| *peer)
            }
        };
        let Some(heaviest) = heaviest else { return true };
        let of = |phase: Phase, age: Duration| {
            let mut all = self.staying().filter(|(_, guest)| guest.peer == heaviest);
            all.find(|(_, guest)| guest.phase == phase && guest.since.elapsed() >= age).map(|(id, _)| *id)
        };
        let patience = if heaviest == peer { PROMPT } else { Duration::ZERO };
        let victim = of(Phase::Waiting, Duration::ZERO).or_else(|| of(Phase::Receiving, patience));
        victim.is_some_and(|victim| self.send_away(victim))
    }

    fn send_away(&mut self, id: u64) -> bool {
        let Some(guest) = self.open.get_mut(&id) else { return false };
        guest.leaving = true;
        guest.leave.notify_one();
        self.dropped += 1;
        true
    }

    /// False: not yet; somebody who has more may have been sent away for it.
    fn take(&mut self, id: u64, bytes: usize, most: usize) -> bool {
        let held: usize = self.open.values().map(|guest| guest.bytes).sum();
        if held + bytes <= most {
            if let Some(guest) = self.open.get_mut(&id) {
                guest.bytes += bytes;
            }
            return true;
        }
        let mut peers: HashMap<IpAddr, usize> = HashMap::new();
        for guest in self.open.values() {
            *peers.entry(guest.peer).or_default() += guest.bytes;
        }
        let Some(peer) = self.open.get(&id).map(|guest| guest.peer) else { return false };
        let own = peers.get(&peer).copied().unwrap_or(0) + bytes;
        // One that leaves will give back what it holds: nobody else goes until it has.
        let is_under_way = self.open.values().any(|guest| guest.leaving && guest.bytes > 0);
        let heaviest = peers.into_iter().max_by_key(|(_, bytes)| *bytes).filter(|(_, bytes)| *bytes > own);
        if let (false, Some((heaviest, _))) = (is_under_way, heaviest) {
            let oldest = {
                let mut theirs =
                    self.staying().filter(|(_, guest)| guest.peer == heaviest && guest.bytes > 0);
                theirs.find(|(_, guest)| guest.phase == Phase::Receiving).map(|(id, _)| *id)
            };
            if let Some(oldest) = oldest {
                self.send_away(oldest);
            }
        }
        false
    }
}

impl Place {
    /// Comes back when the connection is to end for others.
    pub async fn given_up(&self) {
        self.leave.notified().await;
    }

    pub fn waiting(&self) {
        self.set(Phase::Waiting);
        self.give_back();
    }

    pub fn receiving(&self) {
        self.set(Phase::Receiving);
    }

    pub fn answering(&self) {
        self.set(Phase::Answering);
    }

    /// Waits until so much may be held, which is until [`Self::waiting`] or the end. More than there is, is waited
    /// for in vain.
    pub async fn hold(&self, bytes: usize) {
        loop {
            let freed = self.room.freed.notified();
            if self.room.lock().take(self.id, bytes, self.room.limits.bytes) {
                return;
            }
            freed.await;
        }
    }

    fn set(&self, phase: Phase) {
        if let Some(guest) = self.room.lock().open.get_mut(&self.id) {
            guest.phase = phase;
            guest.since = Instant::now();
        }
    }

    fn give_back(&self) {
        let held = self.room.lock().open.get_mut(&self.id).map(|guest| std::mem::take(&mut guest.bytes));
        if held.is_some_and(|held| held > 0) {
            self.room.freed.notify_waiters();
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.give_back();
        self.room.lock().open.remove(&self.id);
    }
}

/// Who has one IPv6 address has a network of them.
fn network(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { all: 8, per_peer: 6, bytes: 100 };

    fn peer(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    async fn is_sent_away(place: &Place) -> bool {
        tokio::time::timeout(Duration::ZERO, place.given_up()).await.is_ok()
    }

    #[tokio::test]
    async fn a_flood_of_one_address_costs_that_address() {
        let room = Places::new(LIMITS);
        let kept = room.enter(peer(1)).unwrap();
        let flood: Vec<_> = (0..100).map(|_| room.enter(peer(2))).collect();
        let inside =
            flood.iter().flatten().filter(|place| !place.room.lock().open[&place.id].leaving).count();
        assert_eq!(inside, LIMITS.per_peer);
        assert!(!is_sent_away(&kept).await);
        assert!(room.take_dropped() > 90 && room.take_dropped() == 0);
    }

    #[tokio::test]
    async fn of_many_addresses_the_oldest_connection_makes_room() {
        let room = Places::new(LIMITS);
        let idle: Vec<_> = (0..8).map(|last| room.enter(peer(last)).unwrap()).collect();
        let newcomer = room.enter(peer(100)).unwrap();
        assert!(is_sent_away(&idle[0]).await && !is_sent_away(&idle[1]).await);
        assert!(!is_sent_away(&newcomer).await);
    }

    #[tokio::test]
    async fn what_is_being_answered_stays_and_its_own_address_is_turned_away() {
        let room = Places::new(LIMITS);
        let busy: Vec<_> = (0..6).map(|_| room.enter(peer(1)).unwrap()).collect();
        busy.iter().for_each(Place::answering);
        assert!(room.enter(peer(1)).is_none());
        busy[3].waiting();
        assert!(room.enter(peer(1)).is_some());
        assert!(is_sent_away(&busy[3]).await);
        // Another address finds room, and takes it where none is left from what only comes in.
        let others: Vec<_> = (2..5).map(|last| room.enter(peer(last)).unwrap()).collect();
        assert_eq!(others.len(), 3);
    }

    #[tokio::test]
    async fn bytes_are_waited_for_and_whoever_holds_most_gives_them() {
        let room = Places::new(LIMITS);
        let [large, small, more] = [1, 2, 1].map(|last| room.enter(peer(last)).unwrap());
        large.receiving();
        large.hold(95).await;
        // Of the same address: nobody is sent away for it.
        assert!(tokio::time::timeout(Duration::from_millis(5), more.hold(10)).await.is_err());
        assert!(!is_sent_away(&large).await);
        let held = tokio::spawn(async move {
            small.hold(10).await;
            small
        });
        large.given_up().await;
        drop(large);
        let small =
            tokio::time::timeout(Duration::from_secs(5), held).await.expect("it is its turn").unwrap();
        assert_eq!(small.room.lock().open[&small.id].bytes, 10);
        small.waiting();
        assert_eq!(small.room.lock().open[&small.id].bytes, 0);
    }

    #[test]
    fn addresses_of_one_network_are_one_address() {
        let parsed = |text: &str| network(text.parse().unwrap());
        assert_eq!(parsed("fd00::1"), parsed("fd00::2"));
        assert_ne!(parsed("fd00::1"), parsed("fd00:0:0:1::1"));
        assert_eq!(parsed("::ffff:10.0.0.1"), peer(1));
    }
}
