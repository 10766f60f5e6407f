//! Free loopback ports, reserved while the test process runs.
//!
//! Ports are below the ephemeral range, so that no outgoing connection uses one by chance.
//! A reservation is a bound socket that never listens. It is bound without `SO_REUSEADDR`, so two test processes never
//! choose the same port; the option is set afterwards, so that our own server can bind the port repeatedly.

use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::os::fd::OwnedFd;

use anyhow::{Result, bail};
use rustix::net::{self, AddressFamily, SocketFlags, SocketType, sockopt};

use crate::random::TestRandom;

/// Where single servers listen.
const SERVER_PORTS: Range<u64> = 23_000..30_000;
/// Port range of cluster nodes; their bus port is 10,000 higher.
const CLUSTER_PORTS: Range<u64> = 20_000..22_700;
const BUS_OFFSET: u16 = 10_000;
/// First ephemeral port of Linux.
const EPHEMERAL_START: u64 = 32_768;

const _: () = assert!(CLUSTER_PORTS.end <= SERVER_PORTS.start);
const _: () = assert!(SERVER_PORTS.end <= CLUSTER_PORTS.start + BUS_OFFSET as u64);
const _: () = assert!(CLUSTER_PORTS.end + BUS_OFFSET as u64 <= EPHEMERAL_START);

const CHOICES_MAX: usize = 1_000;
const STARTS_MAX: usize = 5;

/// A port reserved until this is dropped.
#[derive(Debug)]
pub struct Port {
    pub(crate) number: u16,
    _reservations: Vec<OwnedFd>,
}

impl Port {
    /// A port for one server.
    pub fn for_server() -> Result<Port> {
        choose(SERVER_PORTS, &[0])
    }

    /// A port for a cluster node, with its bus port.
    pub(crate) fn for_cluster_node() -> Result<Port> {
        choose(CLUSTER_PORTS, &[0, BUS_OFFSET])
    }

    /// Where to listen: on loopback.
    pub fn address(&self) -> SocketAddr {
        loopback(self.number)
    }
}

/// Retries with other ports if a program outside the tests took one.
pub(crate) fn with_free_ports<T>(mut start: impl FnMut() -> Result<T>) -> Result<T> {
    for _ in 1..STARTS_MAX {
        match start() {
            Err(error) if format!("{error:#}").contains("Address already in use") => {}
            outcome => return outcome,
        }
    }
    start()
}

pub(crate) fn loopback(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}

fn choose(range: Range<u64>, offsets: &[u16]) -> Result<Port> {
    let mut random = TestRandom::from_entropy();
    for _ in 0..CHOICES_MAX {
        let number = u16::try_from(random.between(range.clone()))?;
        let reservations: rustix::io::Result<Vec<OwnedFd>> =
            offsets.iter().map(|offset| reserve(number + offset)).collect();
        if let Ok(_reservations) = reservations {
            return Ok(Port { number, _reservations });
        }
    }
    bail!("found no free port in {range:?} after {CHOICES_MAX} tries")
}

fn reserve(port: u16) -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let socket = net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
    net::bind(&socket, &loopback(port))?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use anyhow::anyhow;

    use super::*;

    #[test]
    fn a_reserved_port_is_exclusive_and_can_be_bound_repeatedly() {
        let port = Port::for_cluster_node().unwrap();
        let bus = loopback(port.number + BUS_OFFSET);

        assert!(reserve(port.number).is_err());
        assert!(reserve(bus.port()).is_err());
        for _ in 0..3 {
            let _server = TcpListener::bind(port.address()).unwrap();
            let _bus = TcpListener::bind(bus).unwrap();
            assert!(TcpListener::bind(port.address()).is_err());
        }
        drop(port);
        reserve(bus.port()).unwrap();
    }

    #[test]
    fn a_port_conflict_is_retried_a_few_times_and_other_errors_are_not() {
        let mut tries = 0;
        let outcome: Result<()> = with_free_ports(|| {
            tries += 1;
            Err(anyhow!("bind: Address already in use"))
        });
        assert!(outcome.is_err());
        assert_eq!(tries, STARTS_MAX);

        let mut tries = 0;
        let outcome: Result<()> = with_free_ports(|| {
            tries += 1;
            Err(anyhow!("out of memory"))
        });
        assert!(outcome.is_err());
        assert_eq!(tries, 1);
    }
}
