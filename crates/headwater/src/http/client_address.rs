//! The address of the client of a request: of the peer, or the one that a trusted proxy reports.
//!
//! Upstream: `server.rs` adds a [`ClientAddress`] to every request. Downstream: limits per client (`rate_limit.rs`,
//! `body_memory.rs`) and the audit log.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use axum::extract::Request;
use axum::http::HeaderMap;

/// The address of the client of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClientAddress(IpAddr);

impl ClientAddress {
    /// The peer, or behind a trusted proxy (`http.forwarded`) the last address of `X-Forwarded-For`. That one was added
    /// by the proxy; earlier ones come from the client.
    pub(super) fn new(peer: IpAddr, headers: &HeaderMap, is_forwarded: bool) -> Self {
        let forwarded = headers.get_all("x-forwarded-for").iter().next_back();
        let forwarded = forwarded
            .filter(|_| is_forwarded)
            .and_then(|value| parse_address(value.to_str().ok()?.rsplit(',').next()?.trim()));
        Self(forwarded.unwrap_or(peer).to_canonical())
    }

    pub(super) fn ip(self) -> IpAddr {
        self.0
    }
}

/// An address, which some proxies send with its port.
fn parse_address(text: &str) -> Option<IpAddr> {
    let with_port = || text.parse::<SocketAddr>().ok().map(|address| address.ip());
    text.parse().ok().or_else(with_port)
}

/// The network that the limits of a request count against.
pub(super) fn client_of(request: &Request) -> IpAddr {
    let address = request.extensions().get::<ClientAddress>();
    address.map_or(Ipv4Addr::UNSPECIFIED.into(), |address| client_network(address.0))
}

/// What counts as one client: an IPv4 address, or the /64 network of an IPv6 address.
pub(super) fn client_network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(forwarded: &str, is_forwarded: bool) -> ClientAddress {
        let mut headers = HeaderMap::new();
        headers.insert("x-forwarded-for", forwarded.parse().unwrap());
        ClientAddress::new(Ipv4Addr::LOCALHOST.into(), &headers, is_forwarded)
    }

    #[test]
    fn behind_a_trusted_proxy_the_last_forwarded_address_counts() {
        assert_eq!(client("10.9.9.9, 203.0.113.7", true).ip().to_string(), "203.0.113.7");
        assert_eq!(client("::ffff:203.0.113.7", true).ip().to_string(), "203.0.113.7");
        assert_eq!(client("203.0.113.7:4711", true).ip().to_string(), "203.0.113.7");
        assert_eq!(client("[2001:db8::1]:443", true).ip().to_string(), "2001:db8::1");
        assert_eq!(client("nonsense", true).ip(), Ipv4Addr::LOCALHOST);
        assert_eq!(client("203.0.113.7", false).ip(), Ipv4Addr::LOCALHOST);
    }

    #[test]
    fn an_ipv6_network_is_one_client() {
        assert_eq!(
            client_network(client("2001:db8:1:2:3:4:5:6", true).ip()).to_string(),
            "2001:db8:1:2::"
        );
    }
}
