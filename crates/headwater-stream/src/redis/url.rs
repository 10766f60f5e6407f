//! Parses Redis URLs. Error messages never contain the password.

use std::fmt;
use std::path::PathBuf;

use crate::error::{Result, StreamError};

const PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26_379;
/// Maximum length of a key prefix.
const KEY_PREFIX_BYTES_MAX: usize = 64;

/// Host and port of a server; for a unix socket, its path and port 0.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Address {
    pub(super) host: String,
    pub(super) port: u16,
}

/// The kind of deployment and its addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Topology {
    /// One server.
    Single(Address),
    /// The primary of a Sentinel service.
    Sentinel { sentinels: Vec<Address>, service: String },
    /// A cluster, with some of its nodes.
    Cluster { seeds: Vec<Address> },
}

/// Credentials, database, key prefix and TLS settings.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct ConnectionParams {
    pub(super) login: Login,
    /// Credentials for the Sentinels. Empty: none, or those of the servers if a Sentinel requires some.
    pub(super) sentinel_login: Login,
    pub(super) database: u32,
    /// What all keys and channels begin with; may be empty.
    pub(super) key_prefix: String,
    /// Name of the connections in `CLIENT LIST`.
    pub(super) client_name: Option<String>,
    pub(super) tls: bool,
    /// File with the trusted certificates; the system's if `None`.
    pub(super) ca_file: Option<PathBuf>,
    /// Files with the client certificate and its key.
    pub(super) client_certificate: Option<(PathBuf, PathBuf)>,
    /// Name that the server's certificate must have (SNI); the host if `None`.
    pub(super) server_name: Option<String>,
}

/// User and password.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct Login {
    pub(super) user: Option<String>,
    pub(super) password: Option<String>,
}

/// A parsed URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Url {
    pub(super) topology: Topology,
    pub(super) params: ConnectionParams,
}

impl Url {
    pub(super) fn parse(url: &str) -> Result<Self> {
        let (scheme, rest) = url.split_once("://").ok_or_else(|| invalid("`://` is missing"))?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        // The last `@`: a password may contain an unescaped one.
        let (login, hosts) = match authority.rsplit_once('@') {
            Some((login, hosts)) => (Some(login), hosts),
            None => (None, authority),
        };
        let mut params =
            ConnectionParams { tls: scheme == "rediss", ..ConnectionParams::default() };
        if let Some(login) = login {
            let (user, password) = login.split_once(':').unwrap_or((login, ""));
            params.login = Login { user: given(user)?, password: given(password)? };
        }
        parse_query(query, scheme, &mut params)?;
        if is_unix(scheme) {
            if !hosts.is_empty() || path.is_empty() {
                return Err(invalid("a unix socket needs an absolute path: unix:///path"));
            }
            let host = format!("/{}", unescape(path)?);
            return Ok(Self { topology: Topology::Single(Address { host, port: 0 }), params });
        }
        let path = path.trim_end_matches('/');
        let topology = match scheme {
            "redis" | "rediss" => {
                params.database = database(path)?;
                Topology::Single(single(addresses(hosts, PORT)?)?)
            }
            "redis-sentinel" => {
                let (service, number) = path.split_once('/').unwrap_or((path, ""));
                params.database = database(number)?;
                let service = unescape(service)?;
                if service.is_empty() {
                    return Err(invalid(
                        "the service is missing: redis-sentinel://host:port/service",
                    ));
                }
                Topology::Sentinel { sentinels: addresses(hosts, SENTINEL_PORT)?, service }
            }
            "redis-cluster" => {
                if database(path)? != 0 {
                    return Err(invalid("a cluster has only database 0"));
                }
                Topology::Cluster { seeds: addresses(hosts, PORT)? }
            }
            _ => {
                return Err(invalid(
                    "it must start with redis://, rediss://, unix://, redis-sentinel:// or redis-cluster://",
                ));
            }
        };
        Ok(Self { topology, params })
    }
}

impl Address {
    /// Whether this is a unix socket, whose path is the host.
    pub(super) fn is_unix(&self) -> bool {
        self.host.starts_with('/')
    }

    /// Parses `host:port`; an IPv6 address may be in brackets.
    pub(super) fn parse(text: &str, port: u16) -> Result<Self> {
        let (host, number) = if let Some(rest) = text.strip_prefix('[') {
            let (host, rest) = rest.split_once(']').ok_or_else(|| invalid("`[` without `]`"))?;
            (host, rest.strip_prefix(':'))
        } else {
            match text.rsplit_once(':') {
                // Servers write IPv6 addresses without brackets: the port follows the last colon.
                Some((host, number)) => (host, Some(number)),
                None => (text, None),
            }
        };
        if host.is_empty() {
            return Err(invalid("a host is empty"));
        }
        let port = match number {
            None | Some("") => port,
            Some(number) => number.parse().ok().filter(|port| *port != 0).ok_or_else(|| {
                invalid(format!("the port of `{host}` is not between 1 and 65535"))
            })?,
        };
        Ok(Self { host: host.to_owned(), port })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_unix() {
            f.write_str(&self.host)
        } else if self.host.contains(':') {
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
        let database = self.params.database;
        match &self.topology {
            Topology::Single(address) if address.is_unix() => {
                write!(f, "unix://{address}?db={database}")
            }
            Topology::Single(address) => {
                let scheme = if self.params.tls { "rediss" } else { "redis" };
                write!(f, "{scheme}://{address}/{database}")
            }
            Topology::Sentinel { sentinels, service } => {
                write!(f, "redis-sentinel://{}/{service}/{database}", list(sentinels))
            }
            Topology::Cluster { seeds } => write!(f, "redis-cluster://{}", list(seeds)),
        }?;
        match (self.params.key_prefix.as_str(), &self.topology) {
            ("", _) => Ok(()),
            (prefix, Topology::Single(address)) if address.is_unix() => {
                write!(f, "&prefix={prefix}")
            }
            (prefix, _) => write!(f, "?prefix={prefix}"),
        }
    }
}

impl fmt::Debug for ConnectionParams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionParams")
            .field("database", &self.database)
            .field("tls", &self.tls)
            .finish_non_exhaustive()
    }
}

fn parse_query(query: &str, scheme: &str, params: &mut ConnectionParams) -> Result<()> {
    let (mut certificate, mut key) = (None, None);
    for setting in query.split('&').filter(|setting| !setting.is_empty()) {
        match setting.split_once('=').unwrap_or((setting, "")) {
            ("ca", file) if !file.is_empty() => params.ca_file = Some(unescape(file)?.into()),
            ("cert", file) if !file.is_empty() => certificate = Some(unescape(file)?.into()),
            ("key", file) if !file.is_empty() => key = Some(unescape(file)?.into()),
            ("sni", name) if !name.is_empty() => params.server_name = Some(unescape(name)?),
            ("client_name", name) => params.client_name = Some(client_name(name)?),
            ("prefix", prefix) => params.key_prefix = key_prefix(prefix)?,
            ("sentinel_user", user) if scheme == "redis-sentinel" => {
                params.sentinel_login.user = given(user)?;
            }
            ("sentinel_password", password) if scheme == "redis-sentinel" => {
                params.sentinel_login.password = given(password)?;
            }
            ("db", number) if is_unix(scheme) => params.database = database(number)?,
            ("tls", "true") if scheme.starts_with("redis-") => params.tls = true,
            ("tls", "false") if scheme.starts_with("redis-") => params.tls = false,
            ("tls", _) => {
                return Err(invalid(
                    "`tls` must be true or false; for a single server use rediss://",
                ));
            }
            (name, _) => {
                let name: String = name.chars().take(32).collect();
                return Err(invalid(format!(
                    "unknown setting `{name}`, or without a value; known settings are `ca`, `cert`, `key`, `sni`, `tls`, \
                     `client_name`, `prefix`, with unix:// `db`, with redis-sentinel:// `sentinel_user` and `sentinel_password`"
                )));
            }
        }
    }
    params.client_certificate = match (certificate, key) {
        (Some(certificate), Some(key)) => Some((certificate, key)),
        (None, None) => None,
        _ => return Err(invalid("`cert` and `key` must be given together")),
    };
    let needs_tls = params.ca_file.is_some()
        || params.client_certificate.is_some()
        || params.server_name.is_some();
    if needs_tls && !params.tls {
        return Err(invalid("`ca`, `cert`, `key` and `sni` require TLS"));
    }
    if params.sentinel_login.user.is_some() && params.sentinel_login.password.is_none() {
        return Err(invalid("`sentinel_user` without `sentinel_password`"));
    }
    Ok(())
}

fn is_unix(scheme: &str) -> bool {
    matches!(scheme, "unix" | "redis+unix")
}

/// An escaped text; `None` if it is empty.
fn given(text: &str) -> Result<Option<String>> {
    Ok(Some(unescape(text)?).filter(|text| !text.is_empty()))
}

/// The server rejects names with spaces and control characters.
fn client_name(text: &str) -> Result<String> {
    let name = unescape(text)?;
    if name.is_empty() || name.len() > 64 || !name.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(invalid("`client_name` must be 1 to 64 visible ASCII characters"));
    }
    Ok(name)
}

/// A prefix with braces would change the slots of keys.
fn key_prefix(text: &str) -> Result<String> {
    let prefix = unescape(text)?;
    let problem = if prefix.is_empty() {
        "`prefix` is empty; leave it out for keys without a prefix".to_owned()
    } else if prefix.len() > KEY_PREFIX_BYTES_MAX {
        format!("`prefix` has {} bytes; the limit is {KEY_PREFIX_BYTES_MAX}", prefix.len())
    } else if let Some(bad) = prefix.chars().find(|c| c.is_control() || "{}".contains(*c)) {
        format!("`prefix` contains {bad:?}; braces and control characters are not allowed")
    } else {
        return Ok(prefix);
    };
    Err(invalid(problem))
}

fn addresses(hosts: &str, port: u16) -> Result<Vec<Address>> {
    hosts.split(',').map(|host| Address::parse(host, port)).collect()
}

fn single(mut addresses: Vec<Address>) -> Result<Address> {
    match addresses.pop() {
        Some(address) if addresses.is_empty() => Ok(address),
        _ => Err(invalid("several hosts; use redis-sentinel:// or redis-cluster://")),
    }
}

fn database(text: &str) -> Result<u32> {
    if text.is_empty() {
        return Ok(0);
    }
    text.parse().map_err(|_| invalid("the database is not a number"))
}

/// Decodes percent escapes.
fn unescape(text: &str) -> Result<String> {
    let bad = || invalid("`%` must be followed by two hexadecimal digits of UTF-8");
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

fn invalid(problem: impl Into<String>) -> StreamError {
    StreamError::invalid("the stream URL", problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(host: &str, port: u16) -> Address {
        Address { host: host.to_owned(), port }
    }

    #[test]
    fn a_single_server_url_has_credentials_a_database_and_tls() {
        let url =
            Url::parse("rediss://me:p%40ss:w@[::1]:7000/3?ca=/etc/ca.pem&sni=db.example").unwrap();

        assert_eq!(url.topology, Topology::Single(address("::1", 7000)));
        assert_eq!(url.params.login.user.as_deref(), Some("me"));
        assert_eq!(url.params.login.password.as_deref(), Some("p@ss:w"));
        assert_eq!(url.params.server_name.as_deref(), Some("db.example"));
        assert_eq!(url.params.database, 3);
        assert!(url.params.tls);
        assert_eq!(url.to_string(), "rediss://[::1]:7000/3");
    }

    #[test]
    fn several_hosts_are_parsed_for_sentinel_and_cluster() {
        let url = Url::parse("redis-sentinel://:secret@a,b:1/main/2").unwrap();
        let sentinels = vec![address("a", SENTINEL_PORT), address("b", 1)];
        assert_eq!(url.topology, Topology::Sentinel { sentinels, service: "main".to_owned() });
        assert_eq!((url.params.database, url.params.login.user), (2, None));
        let url = "redis-sentinel://a/main?sentinel_user=eve&sentinel_password=s%26t";
        let login = Url::parse(url).unwrap().params.sentinel_login;
        assert_eq!((login.user.as_deref(), login.password.as_deref()), (Some("eve"), Some("s&t")));

        let url = Url::parse("redis-cluster://a:1,b:2?tls=true").unwrap();
        assert_eq!(
            url.topology,
            Topology::Cluster { seeds: vec![address("a", 1), address("b", 2)] }
        );
        assert!(url.params.tls);
    }

    #[test]
    fn a_unix_socket_has_a_path_a_database_and_credentials() {
        for scheme in ["unix", "redis+unix"] {
            let url = Url::parse(&format!("{scheme}://me:pw@/run/re%20dis.sock?db=3")).unwrap();
            assert_eq!(url.topology, Topology::Single(address("/run/re dis.sock", 0)));
            assert_eq!((url.params.database, url.params.login.user.as_deref()), (3, Some("me")));
            assert_eq!(url.to_string(), "unix:///run/re dis.sock?db=3");
        }
    }

    #[test]
    fn every_kind_of_url_has_an_optional_key_prefix() {
        for (url, prefix, shown) in [
            ("redis://a/1?prefix=app1:", "app1:", "redis://a:6379/1?prefix=app1:"),
            ("unix:///s?prefix=a%2Fb&db=1", "a/b", "unix:///s?db=1&prefix=a/b"),
            (
                "redis-sentinel://a/main?prefix=键",
                "键",
                "redis-sentinel://a:26379/main/0?prefix=键",
            ),
            ("redis-cluster://a?prefix=a b", "a b", "redis-cluster://a:6379?prefix=a b"),
            ("redis://a", "", "redis://a:6379/0"),
        ] {
            let parsed = Url::parse(url).unwrap();
            assert_eq!((&*parsed.params.key_prefix, &*parsed.to_string()), (prefix, shown));
        }
        let longest = "a".repeat(KEY_PREFIX_BYTES_MAX);
        let parsed = Url::parse(&format!("redis://a?prefix={longest}")).unwrap();
        assert_eq!(parsed.params.key_prefix, longest);
    }

    #[test]
    fn an_invalid_url_is_rejected_without_showing_the_password() {
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
            "redis://:secret@a?secret=1&",
            "redis://:secret@a?ca=/x",
            "redis://:secret@[::1",
            "redis-sentinel://:secret@a",
            "redis-cluster://:secret@a/1",
            "rediss://:secret@a?tls=false",
            "rediss://:secret@a?cert=/x",
            "redis://:secret@a?sni=b",
            "redis://:secret@a?db=1",
            "redis://:secret@a?client_name=a%20b",
            "redis://:secret@a?prefix=",
            "redis://:secret@a?prefix=a%7Bb",
            "redis://:secret@a?prefix=a}",
            "redis://:secret@a?prefix=a%0Ab",
            &format!("redis://:secret@a?prefix={}", "a".repeat(KEY_PREFIX_BYTES_MAX + 1)),
            "redis-sentinel://:secret@a/main?sentinel_user=b",
            "unix://:secret@host/path",
            "unix://:secret@",
        ] {
            let error = Url::parse(bad).unwrap_err();
            assert!(matches!(error, StreamError::Invalid { .. }), "{bad}: {error}");
            assert!(!error.to_string().contains("secret@"), "{error}");
        }
    }

    #[test]
    fn display_and_debug_do_not_contain_the_password() {
        let url = Url::parse("redis://me:hush@a:1/0").unwrap();
        assert!(!format!("{url} {url:?}").contains("hush"));
    }
}
