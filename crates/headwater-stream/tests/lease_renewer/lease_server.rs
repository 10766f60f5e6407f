//! A fake lease server in paused time, that can be slow, unreachable or lose replies.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use headwater_stream::{
    AcquireResult, Epoch, Fence, HolderName, LeaseInfo, LeaseName, LeaseWatch, Leases, Renewal,
    Result, StreamError,
};
use std::time::Duration;
use tokio::time::{Instant, sleep};

use crate::{MS, SECOND};

/// A fake lease server in paused time.
#[derive(Debug)]
pub(crate) struct LeaseServer {
    pub(crate) held: Mutex<HashMap<LeaseName, (HolderName, Epoch, Instant)>>,
    epochs: Mutex<u64>,
    network: Mutex<Network>,
    /// Leases whose server does not answer a renewal.
    pub(crate) unknown: Mutex<HashSet<LeaseName>>,
    pub(crate) renewals: AtomicUsize,
}

/// What happens to a call on the network.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Network {
    Healthy,
    /// Delay of the request, and delay of the reply.
    Slow(Duration, Duration),
    /// The request never arrives; the call fails after a second.
    Unreachable,
    /// The call is executed, its reply is lost.
    ReplyLost,
    /// Each call draws one of the above, by this seed.
    Random(u64),
}

impl LeaseServer {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            held: Mutex::default(),
            epochs: Mutex::new(100),
            network: Mutex::new(Network::Healthy),
            unknown: Mutex::default(),
            renewals: AtomicUsize::new(0),
        })
    }

    pub(crate) fn network(&self, network: Network) {
        *self.network.lock().unwrap() = network;
    }

    pub(crate) fn holder(&self, lease: &LeaseName) -> Option<(HolderName, Epoch)> {
        let held = self.held.lock().unwrap();
        let (holder, epoch, until) = held.get(lease)?;
        (Instant::now() < *until).then(|| (holder.clone(), *epoch))
    }

    fn draw(&self) -> Network {
        let mut network = self.network.lock().unwrap();
        let Network::Random(state) = &mut *network else { return *network };
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        let delay = |shift: u64| MS * ((*state >> shift) % 4_000) as u32;
        match *state % 10 {
            0 => Network::Unreachable,
            1 => Network::ReplyLost,
            2 | 3 => Network::Slow(delay(20), delay(40)),
            4 | 5 => Network::Slow(delay(20) / 20, delay(40) / 20),
            _ => Network::Healthy,
        }
    }

    async fn call<T>(&self, effect: impl FnOnce(&Self) -> T) -> Result<T> {
        let unavailable = || StreamError::Unavailable { problem: "a test".into(), source: None };
        match self.draw() {
            Network::Slow(there, back) => {
                sleep(there).await;
                let answer = effect(self);
                sleep(back).await;
                Ok(answer)
            }
            Network::Unreachable => {
                sleep(SECOND).await;
                Err(unavailable())
            }
            Network::ReplyLost => {
                effect(self);
                sleep(SECOND).await;
                Err(unavailable())
            }
            Network::Healthy | Network::Random(_) => Ok(effect(self)),
        }
    }

    fn is_held(&self, holder: &HolderName, fence: &Fence) -> bool {
        self.holder(&fence.lease) == Some((holder.clone(), fence.epoch))
    }
}

#[async_trait]
impl Leases for LeaseServer {
    async fn acquire(
        &self,
        lease: &LeaseName,
        holder: &HolderName,
        ttl: Duration,
    ) -> Result<AcquireResult> {
        let effect = |server: &Self| {
            let epoch = match server.holder(lease) {
                Some((by, epoch)) if by == *holder => epoch,
                Some((by, _)) => return AcquireResult::Held { by, remaining: SECOND },
                None => {
                    let mut epochs = server.epochs.lock().unwrap();
                    *epochs += 1;
                    Epoch(*epochs)
                }
            };
            let until = Instant::now() + ttl;
            server.held.lock().unwrap().insert(lease.clone(), (holder.clone(), epoch, until));
            AcquireResult::Won(epoch)
        };
        self.call(effect).await
    }

    async fn renew(
        &self,
        holder: &HolderName,
        leases: &[Fence],
        ttl: Duration,
    ) -> Result<Vec<Renewal>> {
        self.renewals.fetch_add(1, Ordering::SeqCst);
        let effect = |server: &Self| {
            let renew = |fence: &Fence| {
                if server.unknown.lock().unwrap().contains(&fence.lease) {
                    return Renewal::Unknown;
                }
                if !server.is_held(holder, fence) {
                    return Renewal::Lost;
                }
                let until = Instant::now() + ttl;
                let lease = (holder.clone(), fence.epoch, until);
                server.held.lock().unwrap().insert(fence.lease.clone(), lease);
                Renewal::Kept
            };
            leases.iter().map(renew).collect()
        };
        self.call(effect).await
    }

    async fn release(&self, holder: &HolderName, leases: &[Fence]) -> Result<usize> {
        let effect = |server: &Self| {
            let held: Vec<&Fence> = leases.iter().filter(|f| server.is_held(holder, f)).collect();
            for fence in &held {
                server.held.lock().unwrap().remove(&fence.lease);
            }
            held.len()
        };
        self.call(effect).await
    }

    async fn leases(&self, _leases: &[LeaseName]) -> Result<Vec<Option<LeaseInfo>>> {
        unreachable!("the renewer does not read leases")
    }

    async fn watch(&self, _prefix: &str) -> Result<Box<dyn LeaseWatch>> {
        unreachable!("the renewer does not watch leases")
    }
}
