//! URLs of Redis servers, checked once. What is wrong is said without repeating a password.

use std::fmt;
use std::path::PathBuf;

use crate::error::{Result, StreamError};

const PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26_379;

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Address {
    pub(super) host: String,
    pub(super) port: u16,
}

/// Which servers there are, and how one finds the right one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// One server.
    Single(Address),
    /// The primary that these Sentinels name.
    Sentinel { sentinels: Vec<Address>, service: String },
    /// The cluster that these nodes belong to.
    Cluster { seeds: Vec<Address> },
}

/// How to speak to a server.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct Access {
    pub(super) user: Option<String>,
    pub(super) password: Option<String>,
    pub(super) database: u32,
    pub(super) tls: bool,
    /// The certificate to trust instead of the system's.
    pub(super) authority: Option<PathBuf>,
}

/// A URL, taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Url {
    pub(super) place: Place,
    pub(super) access: Access,
}

impl Url {
    pub(super) fn parse(url: &str) -> Result<Self> {
        let (scheme, rest) = url.split_once("://").ok_or_else(|| wrong("it lacks `://`"))?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        // The last `@`: a password may hold one that nobody has escaped.
        let (login, hosts) = match authority.rsplit_once('@') {
            Some((login, hosts)) => (Some(login), hosts),
            None => (None, authority),
        };
        let mut access = Access { tls: scheme == "rediss", ..Access::default() };
        if let Some(login) = login {
            let (user, password) = login.split_once(':').unwrap_or((login, ""));
            access.user = Some(unescape(user)?).filter(|user| !user.is_empty());
            access.password = Some(unescape(password)?).filter(|password| !password.is_empty());
            if access.user.is_some() && access.password.is_none() {
                return Err(wrong("it names a user without a password"));
            }
        }
        settings(query, scheme, &mut access)?;
        let path = path.trim_end_matches('/');
        let place = match scheme {
            "redis" | "rediss" => {
                access.database = database(path)?;
                Place::Single(only(addresses(hosts, PORT)?)?)
            }
            "redis-sentinel" => {
                let (service, number) = path.split_once('/').unwrap_or((path, ""));
                access.database = database(number)?;
                let service = unescape(service)?;
                if service.is_empty() {
                    return Err(wrong("it lacks the service: redis-sentinel://host:port/service"));
                }
                Place::Sentinel { sentinels: addresses(hosts, SENTINEL_PORT)?, service }
            }
            "redis-cluster" => {
                if database(path)? != 0 {
                    return Err(wrong("a cluster has no database but 0"));
                }
                Place::Cluster { seeds: addresses(hosts, PORT)? }
            }
            _ => {
                return Err(wrong(
                    "it must begin with redis://, rediss://, redis-sentinel:// or redis-cluster://",
                ));
            }
        };
        Ok(Self { place, access })
    }
}

impl Address {
    /// `host:port`, with brackets around an IPv6 address.
    pub(super) fn parse(text: &str, port: u16) -> Result<Self> {
        let (host, number) = if let Some(rest) = text.strip_prefix('[') {
            let (host, rest) =
                rest.split_once(']').ok_or_else(|| wrong("a `[` without its `]`"))?;
            (host, rest.strip_prefix(':'))
        } else {
            match text.rsplit_once(':') {
                Some((host, number)) if !host.contains(':') => (host, Some(number)),
                // A server names its own IPv6 address without brackets.
                Some((host, number)) => (host, Some(number)),
                None => (text, None),
            }
        };
        if host.is_empty() {
            return Err(wrong("a host is empty"));
        }
        let port = match number {
            None | Some("") => port,
            Some(number) => number
                .parse()
                .ok()
                .filter(|port| *port != 0)
                .ok_or_else(|| wrong(format!("the port of `{host}` is not 1 to 65535")))?,
        };
        Ok(Self { host: host.to_owned(), port })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl fmt::Display for Url {
    /// The URL without credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |addresses: &[Address]| {
            addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
        };
        let database = self.access.database;
        match &self.place {
            Place::Single(address) => {
                let scheme = if self.access.tls { "rediss" } else { "redis" };
                write!(f, "{scheme}://{address}/{database}")
            }
            Place::Sentinel { sentinels, service } => {
                write!(f, "redis-sentinel://{}/{service}/{database}", list(sentinels))
            }
            Place::Cluster { seeds } => write!(f, "redis-cluster://{}", list(seeds)),
        }
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access")
            .field("database", &self.database)
            .field("tls", &self.tls)
            .finish_non_exhaustive()
    }
}

fn settings(query: &str, scheme: &str, access: &mut Access) -> Result<()> {
    for setting in query.split('&').filter(|setting| !setting.is_empty()) {
        match setting.split_once('=').unwrap_or((setting, "")) {
            ("ca", file) if !file.is_empty() => access.authority = Some(unescape(file)?.into()),
            ("tls", "true") if scheme != "redis" => access.tls = true,
            ("tls", "false") if scheme != "rediss" => access.tls = false,
            ("tls", _) => {
                return Err(wrong("`tls` is true or false; for one server write rediss://"));
            }
            (name, _) => {
                let name: String = name.chars().take(32).collect();
                return Err(wrong(format!(
                    "it has the setting `{name}`; known are `ca` and `tls`"
                )));
            }
        }
    }
    if access.authority.is_some() && !access.tls {
        return Err(wrong("it has `ca` without TLS"));
    }
    Ok(())
}

fn addresses(hosts: &str, port: u16) -> Result<Vec<Address>> {
    hosts.split(',').map(|host| Address::parse(host, port)).collect()
}

fn only(mut addresses: Vec<Address>) -> Result<Address> {
    match addresses.pop() {
        Some(address) if addresses.is_empty() => Ok(address),
        _ => Err(wrong("it names several hosts; use redis-sentinel:// or redis-cluster://")),
    }
}

fn database(text: &str) -> Result<u32> {
    if text.is_empty() {
        return Ok(0);
    }
    text.parse().map_err(|_| wrong("the database is not a number"))
}

/// Turns `%40` into `@` and so on.
fn unescape(text: &str) -> Result<String> {
    let bad = || wrong("a `%` is not followed by two hexadecimal digits of UTF-8");
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digits = tail.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        bytes.push(digits.and_then(|d| u8::from_str_radix(d, 16).ok()).ok_or_else(bad)?);
        rest = &tail[2..];
    }
    String::from_utf8(bytes).map_err(|_| bad())
}

fn wrong(problem: impl Into<String>) -> StreamError {
    StreamError::invalid("the stream URL", problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(host: &str, port: u16) -> Address {
        Address { host: host.to_owned(), port }
    }

    #[test]
    fn a_url_of_one_server_has_a_login_a_database_and_tls() {
        let url = Url::parse("rediss://me:p%40ss:w@[::1]:7000/3?ca=/etc/ca.pem").unwrap();

        assert_eq!(url.place, Place::Single(address("::1", 7000)));
        assert_eq!(url.access.user.as_deref(), Some("me"));
        assert_eq!(url.access.password.as_deref(), Some("p@ss:w"));
        assert_eq!(url.access.database, 3);
        assert!(url.access.tls);
        assert_eq!(url.to_string(), "rediss://[::1]:7000/3");
    }

    #[test]
    fn several_hosts_belong_to_sentinel_or_a_cluster() {
        let url = Url::parse("redis-sentinel://:secret@a,b:1/main/2").unwrap();
        let sentinels = vec![address("a", SENTINEL_PORT), address("b", 1)];
        assert_eq!(url.place, Place::Sentinel { sentinels, service: "main".to_owned() });
        assert_eq!((url.access.database, url.access.user), (2, None));

        let url = Url::parse("redis-cluster://a:1,b:2?tls=true").unwrap();
        assert_eq!(url.place, Place::Cluster { seeds: vec![address("a", 1), address("b", 2)] });
        assert!(url.access.tls);
    }

    #[test]
    fn a_bad_url_is_refused_without_repeating_the_password() {
        for bad in [
            "redis:secret",
            "http://:secret@a",
            "redis://:secret@",
            "redis://:secret@a:0",
            "redis://:secret@a:70000",
            "redis://:secret@a:x",
            "redis://:secret@a/x",
            "redis://:secret@a,b",
            "redis://:secret%zz@a",
            "redis://secret@a",
            "redis://:secret@a?secret=1&",
            "redis://:secret@a?ca=/x",
            "redis://:secret@[::1",
            "redis-sentinel://:secret@a",
            "redis-cluster://:secret@a/1",
            "rediss://:secret@a?tls=false",
        ] {
            let error = Url::parse(bad).unwrap_err();
            assert!(matches!(error, StreamError::Invalid { .. }), "{bad}: {error}");
            assert!(!error.to_string().contains("secret@"), "{error}");
        }
    }

    #[test]
    fn what_is_printed_holds_no_password() {
        let url = Url::parse("redis://me:hush@a:1/0").unwrap();
        assert!(!format!("{url} {url:?}").contains("hush"));
    }
}
