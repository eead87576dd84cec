//! Limits the connections of a listening address that every peer can reach. A new connection never waits: when all
//! slots are in use, the peer that has most of them loses one: of several such, one that is between requests, and of
//! these the oldest. A connection that is being answered, and one that comes from the node itself, goes last. So a flood
//! from one address costs that address, and a connection that sends its request at once is served, however many others
//! are idle.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// A real client has sent its request within this; after that, its connection may be ended for a new one of the same
/// peer.
const PROMPT: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Connections of everybody together.
    pub all: usize,
    /// Connections of one address.
    pub per_peer: usize,
    /// What all requests that are being received may hold together.
    pub bytes: usize,
    /// So long an answer may take before its connection may be ended for another; none: it never is.
    pub answer: Option<Duration>,
}

/// The slots of one listening address. Clones share them.
#[derive(Debug, Clone)]
pub struct ConnectionSlots(Arc<SlotTable>);

#[derive(Debug)]
struct SlotTable {
    limits: Limits,
    connections: Mutex<OpenConnections>,
    /// Bytes were given back.
    freed: Notify,
}

/// By the order in which they came.
#[derive(Debug, Default)]
struct OpenConnections {
    next: u64,
    open: BTreeMap<u64, OpenConnection>,
    dropped: u64,
}

#[derive(Debug)]
struct OpenConnection {
    peer: IpAddr,
    /// From the address that it has reached: somebody on the node itself, as kubelet is.
    is_own: bool,
    phase: ConnectionPhase,
    since: Instant,
    bytes: usize,
    leave: Arc<Notify>,
    /// It was told to, and is not gone yet.
    leaving: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ConnectionPhase {
    /// Between requests, or before the first.
    Waiting,
    /// A request is coming in.
    Receiving,
    /// It is there and is being answered: see [`Limits::answer`].
    Answering,
}

/// The slot of one connection, free again when this is dropped.
#[derive(Debug)]
pub struct ConnectionSlot {
    table: Arc<SlotTable>,
    id: u64,
    peer: IpAddr,
    leave: Arc<Notify>,
}

impl ConnectionSlots {
    pub fn new(limits: Limits) -> Self {
        Self(Arc::new(SlotTable { limits, connections: Mutex::default(), freed: Notify::new() }))
    }

    /// Takes a slot for a connection of the peer. None: all connections of the peer are being answered; close the new one.
    pub fn enter(&self, peer: IpAddr) -> Option<ConnectionSlot> {
        self.enter_at(peer, None)
    }

    /// The same for a connection to one of this node's addresses, which is told from those of others.
    pub fn enter_at(&self, peer: IpAddr, reached: Option<IpAddr>) -> Option<ConnectionSlot> {
        let is_own = reached.is_some_and(|reached| reached.to_canonical() == peer.to_canonical());
        let (peer, limits) = (network(peer), self.0.limits);
        let mut connections = self.0.lock();
        // Those that were told to go need their turn to do so.
        let leaving = connections.open.values().filter(|connection| connection.leaving).count();
        if leaving > limits.all || !connections.free_slot(peer, limits) {
            connections.dropped += 1;
            return None;
        }
        let (id, leave) = (connections.next, Arc::new(Notify::new()));
        connections.next += 1;
        let connection = OpenConnection {
            peer,
            is_own,
            phase: ConnectionPhase::Waiting,
            since: Instant::now(),
            bytes: 0,
            leave: leave.clone(),
            leaving: false,
        };
        connections.open.insert(id, connection);
        Some(ConnectionSlot { table: self.0.clone(), id, peer, leave })
    }

    /// Connections that were ended or refused for want of a slot, since the last call.
    pub fn take_dropped(&self) -> u64 {
        std::mem::take(&mut self.0.lock().dropped)
    }
}

impl SlotTable {
    fn lock(&self) -> MutexGuard<'_, OpenConnections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OpenConnections {
    fn staying(&self) -> impl Iterator<Item = (&u64, &OpenConnection)> {
        self.open.iter().filter(|(_, connection)| !connection.leaving)
    }

    fn free_slot(&mut self, peer: IpAddr, limits: Limits) -> bool {
        // How many each address has: the newcomer counts with his.
        let mut counts: HashMap<IpAddr, usize> = HashMap::from([(peer, 1)]);
        let mut all = 0;
        for (_, connection) in self.staying() {
            *counts.entry(connection.peer).or_default() += 1;
            all += 1;
        }
        let count = |of: IpAddr| counts.get(&of).copied().unwrap_or(0);
        let only_own = count(peer) > limits.per_peer;
        if !only_own && all < limits.all {
            return true;
        }
        let of = |connection: &OpenConnection| {
            let patience = match connection.phase {
                ConnectionPhase::Waiting => Some(Duration::ZERO),
                ConnectionPhase::Receiving if connection.peer == peer => Some(PROMPT),
                ConnectionPhase::Receiving => Some(Duration::ZERO),
                ConnectionPhase::Answering => limits.answer,
            };
            patience.is_some_and(|patience| connection.since.elapsed() >= patience)
        };
        let candidates =
            self.staying().filter(|(_, one)| (!only_own || one.peer == peer) && of(one)).map(|(id, one)| {
                let last = (one.is_own, one.phase == ConnectionPhase::Answering);
                ((last, Reverse(count(one.peer)), one.phase != ConnectionPhase::Waiting, *id), *id)
            });
        let victim = candidates.min().map(|(_, id)| id);
        victim.is_some_and(|victim| self.send_away(victim))
    }

    fn send_away(&mut self, id: u64) -> bool {
        let Some(connection) = self.open.get_mut(&id) else { return false };
        connection.leaving = true;
        connection.leave.notify_one();
        self.dropped += 1;
        true
    }

    /// False: not yet; somebody who has more may have been sent away for it.
    fn take(&mut self, id: u64, bytes: usize, most: usize) -> bool {
        let held: usize = self.open.values().map(|connection| connection.bytes).sum();
        if held + bytes <= most {
            if let Some(connection) = self.open.get_mut(&id) {
                connection.bytes += bytes;
            }
            return true;
        }
        let mut peers: HashMap<IpAddr, usize> = HashMap::new();
        for connection in self.open.values() {
            *peers.entry(connection.peer).or_default() += connection.bytes;
        }
        let Some(peer) = self.open.get(&id).map(|connection| connection.peer) else { return false };
        let own = peers.get(&peer).copied().unwrap_or(0) + bytes;
        // One that leaves will give back what it holds: nobody else goes until it has.
        let is_under_way = self.open.values().any(|connection| connection.leaving && connection.bytes > 0);
        let heaviest = peers.into_iter().max_by_key(|(_, bytes)| *bytes).filter(|(_, bytes)| *bytes > own);
        if let (false, Some((heaviest, _))) = (is_under_way, heaviest) {
            let oldest = {
                let mut theirs = self
                    .staying()
                    .filter(|(_, connection)| connection.peer == heaviest && connection.bytes > 0);
                theirs
                    .find(|(_, connection)| connection.phase == ConnectionPhase::Receiving)
                    .map(|(id, _)| *id)
            };
            if let Some(oldest) = oldest {
                self.send_away(oldest);
            }
        }
        false
    }
}

impl ConnectionSlot {
    /// Whose it is: of an IPv6 address the network.
    pub fn peer(&self) -> IpAddr {
        self.peer
    }

    /// Returns when the connection must end so that others get its slot.
    pub async fn given_up(&self) {
        self.leave.notified().await;
    }

    pub fn waiting(&self) {
        self.set(ConnectionPhase::Waiting);
        self.give_back();
    }

    pub fn receiving(&self) {
        self.set(ConnectionPhase::Receiving);
    }

    pub fn answering(&self) {
        self.set(ConnectionPhase::Answering);
    }

    /// Waits until so much may be held, which is until [`Self::waiting`] or the end. More than there is, is waited
    /// for in vain.
    pub async fn hold(&self, bytes: usize) {
        loop {
            let freed = self.table.freed.notified();
            if self.table.lock().take(self.id, bytes, self.table.limits.bytes) {
                return;
            }
            freed.await;
        }
    }

    fn set(&self, phase: ConnectionPhase) {
        if let Some(connection) = self.table.lock().open.get_mut(&self.id) {
            connection.phase = phase;
            connection.since = Instant::now();
        }
    }

    fn give_back(&self) {
        let held =
            self.table.lock().open.get_mut(&self.id).map(|connection| std::mem::take(&mut connection.bytes));
        if held.is_some_and(|held| held > 0) {
            self.table.freed.notify_waiters();
        }
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.give_back();
        self.table.lock().open.remove(&self.id);
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

    const LIMITS: Limits = Limits { all: 8, per_peer: 6, bytes: 100, answer: None };

    fn peer(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    async fn is_sent_away(slot: &ConnectionSlot) -> bool {
        tokio::time::timeout(Duration::ZERO, slot.given_up()).await.is_ok()
    }

    #[tokio::test]
    async fn a_flood_of_one_address_costs_that_address() {
        let table = ConnectionSlots::new(LIMITS);
        let kept = table.enter(peer(1)).unwrap();
        let flood: Vec<_> = (0..100).map(|_| table.enter(peer(2))).collect();
        let inside = flood.iter().flatten().filter(|slot| !slot.table.lock().open[&slot.id].leaving).count();
        assert_eq!(inside, LIMITS.per_peer);
        assert!(!is_sent_away(&kept).await);
        assert!(table.take_dropped() > 90 && table.take_dropped() == 0);
    }

    #[tokio::test]
    async fn of_many_addresses_the_oldest_connection_makes_room() {
        let table = ConnectionSlots::new(LIMITS);
        let idle: Vec<_> = (0..8).map(|last| table.enter(peer(last)).unwrap()).collect();
        let newcomer = table.enter(peer(100)).unwrap();
        assert!(is_sent_away(&idle[0]).await && !is_sent_away(&idle[1]).await);
        assert!(!is_sent_away(&newcomer).await);
    }

    #[tokio::test]
    async fn what_is_being_answered_stays_and_its_own_address_is_turned_away() {
        let table = ConnectionSlots::new(LIMITS);
        let busy: Vec<_> = (0..6).map(|_| table.enter(peer(1)).unwrap()).collect();
        busy.iter().for_each(ConnectionSlot::answering);
        assert!(table.enter(peer(1)).is_none());
        busy[3].waiting();
        assert!(table.enter(peer(1)).is_some());
        assert!(is_sent_away(&busy[3]).await);
        // Another address finds room, and takes it where none is left from what only comes in.
        let others: Vec<_> = (2..5).map(|last| table.enter(peer(last)).unwrap()).collect();
        assert_eq!(others.len(), 3);
    }

    #[tokio::test]
    async fn of_many_addresses_those_that_are_answered_and_the_nodes_own_go_last() {
        let table = ConnectionSlots::new(Limits { answer: Some(Duration::ZERO), ..LIMITS });
        let here = peer(200);
        let own = table.enter_at(here, Some(here)).unwrap();
        let answered = table.enter_at(peer(1), Some(here)).unwrap();
        answered.answering();
        let receiving = table.enter_at(peer(2), Some(here)).unwrap();
        receiving.receiving();
        let idle: Vec<_> = (3..8).map(|last| table.enter_at(peer(last), Some(here)).unwrap()).collect();
        // Each newcomer is answered at once: nobody who only waits is left in the end.
        let newcomer = |last: u8| {
            let slot = table.enter_at(peer(last), Some(here)).unwrap();
            slot.answering();
            slot
        };
        let busy: Vec<_> = (10..15).map(newcomer).collect();
        for slot in &idle {
            assert!(is_sent_away(slot).await);
        }
        drop(idle);
        assert!(!is_sent_away(&receiving).await);
        let sixth = newcomer(20);
        assert!(is_sent_away(&receiving).await && !is_sent_away(&answered).await);
        drop(receiving);
        let seventh = newcomer(21);
        assert!(is_sent_away(&answered).await, "the oldest, where all are being answered");
        drop(answered);
        assert!(!is_sent_away(&own).await, "the node's own goes last, whatever it does");
        // Of the node's own there are not more than of others.
        let mut more = vec![own];
        for _ in 0..20 {
            more.push(table.enter_at(here, Some(here)).unwrap());
            more.retain(|slot| !slot.table.lock().open[&slot.id].leaving);
        }
        assert_eq!(more.len(), LIMITS.per_peer);
        drop((busy, sixth, seventh));
    }

    #[tokio::test]
    async fn bytes_are_waited_for_and_whoever_holds_most_gives_them() {
        let table = ConnectionSlots::new(LIMITS);
        let [large, small, more] = [1, 2, 1].map(|last| table.enter(peer(last)).unwrap());
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
        assert_eq!(small.table.lock().open[&small.id].bytes, 10);
        small.waiting();
        assert_eq!(small.table.lock().open[&small.id].bytes, 0);
    }

    #[test]
    fn addresses_of_one_network_are_one_address() {
        let parsed = |text: &str| network(text.parse().unwrap());
        assert_eq!(parsed("fd00::1"), parsed("fd00::2"));
        assert_ne!(parsed("fd00::1"), parsed("fd00:0:0:1::1"));
        assert_eq!(parsed("::ffff:10.0.0.1"), peer(1));
    }
}
