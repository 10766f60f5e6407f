//! A TCP proxy that breaks connections on demand.
//!
//! It runs on its own thread, so it neither needs nor blocks the runtime of a test.
//! Guarantees: a command takes effect before its call returns; bytes forwarded before are not affected.
//! Not here: forwarding of single chunks (see `link`).

mod faults;
mod link;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc as blocking;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use self::faults::{DropRule, HoldRule, OneShots, ProxyFaults};
use crate::ports::Port;
use crate::wait::lock;

/// A proxy in front of one server; all its connections close when it is dropped.
#[derive(Debug)]
pub struct Proxy {
    port: Port,
    commands: Option<mpsc::UnboundedSender<(ProxyCommand, blocking::Sender<Result<()>>)>>,
    shared: Arc<ProxyState>,
    thread: Option<JoinHandle<()>>,
}

/// State shared by the handle, the accept loop and the connections.
#[derive(Debug)]
struct ProxyState {
    target: SocketAddr,
    faults: watch::Sender<ProxyFaults>,
    one_shots: std::sync::Mutex<OneShots>,
    accepted: AtomicU64,
    open: AtomicUsize,
}

#[derive(Debug)]
enum ProxyCommand {
    Cut,
    CutOnce,
    Stall,
    DropSilently,
    Delay(Duration),
    DropAfter(usize),
    DropReply,
    DropReplies(DropRule),
    Hold(HoldRule),
    Heal,
}

impl Proxy {
    /// Starts a proxy that forwards everything to `target`.
    pub fn start(target: SocketAddr) -> Result<Proxy> {
        Proxy::start_with(target, OneShots::default())
    }

    /// Delays chunks by 0 to 5 ms, and every 50 to 200 chunks cuts a connection or drops a reply.
    pub fn flaky(target: SocketAddr, seed: u64) -> Result<Proxy> {
        Proxy::start_with(target, OneShots::flaky(seed))
    }

    fn start_with(target: SocketAddr, one_shots: OneShots) -> Result<Proxy> {
        let port = Port::for_server()?;
        let shared = Arc::new(ProxyState {
            target,
            faults: watch::Sender::default(),
            one_shots: one_shots.into(),
            accepted: AtomicU64::new(0),
            open: AtomicUsize::new(0),
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        // Not `block_on`: the caller may be inside a runtime, where that panics.
        let listener = std::net::TcpListener::bind(port.address())?;
        listener.set_nonblocking(true)?;
        let listener = {
            let _inside = runtime.enter();
            TcpListener::from_std(listener)?
        };
        let (commands, received) = mpsc::unbounded_channel();
        let worker = ProxyTask {
            address: port.address(),
            listener: Some(listener),
            connections: JoinSet::new(),
            shared: Arc::clone(&shared),
        };
        let thread = thread::Builder::new()
            .name("headwater-testkit-proxy".to_string())
            .spawn(move || runtime.block_on(worker.run(received)))?;
        Ok(Proxy { port, commands: Some(commands), shared, thread: Some(thread) })
    }

    /// The address to give to the client.
    pub fn addr(&self) -> SocketAddr {
        self.port.address()
    }

    /// Closes all connections and refuses new ones, until `heal`.
    pub fn cut(&self) -> Result<()> {
        self.send(ProxyCommand::Cut)
    }

    /// Closes all connections; new ones are accepted.
    pub fn cut_once(&self) -> Result<()> {
        self.send(ProxyCommand::CutOnce)
    }

    /// Accepts and keeps connections, but forwards nothing either way, until `heal`.
    pub fn stall(&self) -> Result<()> {
        self.send(ProxyCommand::Stall)
    }

    /// Forwards nothing on the connections that exist now, and does not close them, until `heal`: as a NAT that has forgotten
    /// them. New connections work.
    pub fn drop_silently(&self) -> Result<()> {
        self.send(ProxyCommand::DropSilently)
    }

    /// Delays each chunk by this long, in both directions.
    pub fn delay(&self, delay: Duration) -> Result<()> {
        self.send(ProxyCommand::Delay(delay))
    }

    /// Once: forwards this many more bytes to the server, then closes that connection.
    pub fn drop_after(&self, bytes: usize) -> Result<()> {
        self.send(ProxyCommand::DropAfter(bytes))
    }

    /// Once: forwards the next request, then closes its connection instead of forwarding a reply.
    pub fn drop_reply(&self) -> Result<()> {
        self.send(ProxyCommand::DropReply)
    }

    /// For the next `times` requests that contain `pattern`: forwards each one, then closes its connection instead of
    /// forwarding a reply.
    pub fn drop_replies(&self, pattern: &str, times: u64) -> Result<()> {
        self.send(ProxyCommand::DropReplies(DropRule::new(pattern, times)))
    }

    /// Until `heal`: delays every `one_in`-th request that contains `pattern` by `pause`. Only its own connection
    /// waits; a delayed request is forwarded after the pause, also after `heal`.
    pub fn hold(&self, pattern: &str, one_in: u64, pause: Duration) -> Result<()> {
        self.send(ProxyCommand::Hold(HoldRule::new(pattern, one_in, pause)))
    }

    /// Ends all faults; stalled connections continue. A flaky proxy stops being flaky.
    pub fn heal(&self) -> Result<()> {
        self.send(ProxyCommand::Heal)
    }

    /// How many connections were accepted so far.
    pub fn connections(&self) -> u64 {
        self.shared.accepted.load(Ordering::SeqCst)
    }

    /// How many connections are open now.
    pub fn open_connections(&self) -> usize {
        self.shared.open.load(Ordering::SeqCst)
    }

    /// How many connections were closed by `drop_after`, `drop_reply`, `drop_replies` or at random.
    pub fn faults(&self) -> u64 {
        lock(&self.shared.one_shots).fired
    }

    /// How many requests were held back by `hold`.
    pub fn held(&self) -> u64 {
        lock(&self.shared.one_shots).held
    }

    fn send(&self, command: ProxyCommand) -> Result<()> {
        let gone = "the proxy thread has ended";
        let (done, wait) = blocking::channel();
        self.commands.as_ref().context(gone)?.send((command, done)).ok().context(gone)?;
        wait.recv().context(gone)?
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The accept loop. Commands and connections share its single thread, so a command cannot overtake a write.
struct ProxyTask {
    address: SocketAddr,
    listener: Option<TcpListener>,
    connections: JoinSet<()>,
    shared: Arc<ProxyState>,
}

impl ProxyTask {
    async fn run(
        mut self,
        mut commands: mpsc::UnboundedReceiver<(ProxyCommand, blocking::Sender<Result<()>>)>,
    ) {
        loop {
            // All three are cancel-safe.
            tokio::select! {
                command = commands.recv() => {
                    let Some((command, done)) = command else { return };
                    let outcome = self.execute(command).await;
                    let _ = done.send(outcome);
                }
                client = accept(self.listener.as_ref()) => self.serve(client),
                Some(_) = self.connections.join_next() => {}
            }
        }
    }

    async fn execute(&mut self, command: ProxyCommand) -> Result<()> {
        match command {
            ProxyCommand::Cut => {
                self.listener = None;
                self.connections.shutdown().await;
            }
            ProxyCommand::CutOnce => self.connections.shutdown().await,
            ProxyCommand::Stall => self.shared.faults.send_modify(|faults| faults.stalled = true),
            ProxyCommand::DropSilently => {
                let forgotten = self.shared.accepted.load(Ordering::SeqCst);
                self.shared.faults.send_modify(|faults| faults.forgotten = forgotten);
            }
            ProxyCommand::Delay(delay) => {
                self.shared.faults.send_modify(|faults| faults.delay = delay);
            }
            ProxyCommand::DropAfter(bytes) => lock(&self.shared.one_shots).drop_after = Some(bytes),
            ProxyCommand::DropReply => lock(&self.shared.one_shots).drop_reply = true,
            ProxyCommand::DropReplies(drop) => {
                lock(&self.shared.one_shots).drop_replies = Some(drop);
            }
            ProxyCommand::Hold(hold) => lock(&self.shared.one_shots).hold = Some(hold),
            ProxyCommand::Heal => {
                if self.listener.is_none() {
                    self.listener = Some(TcpListener::bind(self.address).await?);
                }
                lock(&self.shared.one_shots).clear();
                self.shared.faults.send_replace(ProxyFaults::default());
            }
        }
        Ok(())
    }

    fn serve(&mut self, client: TcpStream) {
        let number = self.shared.accepted.fetch_add(1, Ordering::SeqCst) + 1;
        self.connections.spawn(link::run(client, number, Arc::clone(&self.shared)));
    }
}

async fn accept(listener: Option<&TcpListener>) -> TcpStream {
    let Some(listener) = listener else { return std::future::pending().await };
    loop {
        match listener.accept().await {
            Ok((client, _)) => return client,
            // Probably out of file descriptors: back off.
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}
