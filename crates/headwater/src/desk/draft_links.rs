//! Links that approve or reject one version of a draft without a token.
//!
//! Upstream: the route `GET /drafts/ID/link` and notifications of waiting drafts write them; `http/draft_pages.rs` reads them.
//! No I/O. A link is `v1.NUMBER.DRAFT.VERSION.ACTION.EXPIRES.HMAC`: number and id of the draft, its version, `approve` or
//! `reject`, the end of the link in Unix seconds, and a keyed hash (HMAC-SHA-256) of the rest with `desk.link_secret`.
//! Guarantees: every process with the same secret accepts a link, until it expires or the secret is changed; a changed link is
//! rejected. Not here: whether the draft still waits in this version.

use std::time::Duration;

use headwater_stream::clock::Timestamp;
use hmac::{Hmac, KeyInit, Mac};
use secrecy::{ExposeSecret, SecretString};
use sha2::Sha256;
use uuid::Uuid;

/// Path of the pages that links lead to; the number of the draft follows.
pub(crate) const DRAFT_LINK_PATH: &str = "/links/drafts/";

/// Version of the format.
const VERSION: &str = "v1";

/// Maximum bytes of a link in a request.
const LINK_BYTES_MAX: usize = 300;

/// What a link decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkAction {
    Approve,
    Reject,
}

impl LinkAction {
    /// The name in a link.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Approve => "approve",
            Self::Reject => "reject",
        }
    }
}

/// One version of a draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DraftVersion {
    pub(crate) number: i64,
    pub(crate) draft_id: Uuid,
    pub(crate) version: i64,
}

/// A link whose signature and time are valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VerifiedLink {
    pub(crate) draft: DraftVersion,
    pub(crate) action: LinkAction,
}

/// Why a link is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkError {
    /// It was changed, cut off, or signed with another secret.
    Invalid,
    /// Its time is over.
    Expired,
}

/// Signs and verifies links.
#[derive(Clone, Debug)]
pub(crate) struct DraftLinks {
    secret: SecretString,
    base_url: String,
    lifetime: Duration,
}

impl DraftLinks {
    /// Links below this URL, which end after `lifetime`.
    pub(crate) fn new(secret: SecretString, base_url: &str, lifetime: Duration) -> Self {
        Self { secret, base_url: base_url.trim_end_matches('/').to_owned(), lifetime }
    }

    /// When a link that is signed now ends. Whole seconds.
    pub(crate) fn expires_at(&self, now: Timestamp) -> Timestamp {
        Timestamp::from_millis(now.after(self.lifetime).as_millis() / 1000 * 1000)
    }

    /// The URL of a link that is signed now.
    pub(crate) fn url(&self, draft: DraftVersion, action: LinkAction, now: Timestamp) -> String {
        let DraftVersion { number, draft_id, version } = draft;
        let (id, action) = (draft_id.simple(), action.as_str());
        let expires = self.expires_at(now).as_millis() / 1000;
        let signed = format!("{VERSION}.{number}.{id}.{version}.{action}.{expires}");
        let mac = hex::encode(self.mac(&signed).finalize().into_bytes());
        format!("{}{DRAFT_LINK_PATH}{number}?link={signed}.{mac}", self.base_url)
    }

    /// The draft and the decision of a link.
    pub(crate) fn verify(&self, link: &str, now: Timestamp) -> Result<VerifiedLink, LinkError> {
        let (verified, expires) = self.read(link).ok_or(LinkError::Invalid)?;
        if now.as_millis() / 1000 >= expires {
            return Err(LinkError::Expired);
        }
        Ok(verified)
    }

    fn read(&self, link: &str) -> Option<(VerifiedLink, u64)> {
        let (signed, presented) = link.rsplit_once('.').filter(|_| link.len() <= LINK_BYTES_MAX)?;
        // Compared in constant time, before anything of it is used.
        self.mac(signed).verify_slice(&hex::decode(presented).ok()?).ok()?;
        let parts: Vec<&str> = signed.split('.').collect();
        let [VERSION, number, draft_id, version, action, expires] = parts[..] else { return None };
        let action = [LinkAction::Approve, LinkAction::Reject]
            .into_iter()
            .find(|one| one.as_str() == action)?;
        let draft = DraftVersion {
            number: number.parse().ok()?,
            draft_id: Uuid::parse_str(draft_id).ok()?,
            version: version.parse().ok()?,
        };
        Some((VerifiedLink { draft, action }, expires.parse().ok()?))
    }

    /// The prefix keeps links apart from everything else that may be signed with the same secret.
    fn mac(&self, signed: &str) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(self.secret.expose_secret().as_bytes())
            .expect("a key of any length is valid");
        mac.update(b"headwater draft link\n");
        mac.update(signed.as_bytes());
        mac
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp::from_millis(1_700_000_000_000);
    const DAY: Duration = Duration::from_secs(24 * 3600);

    fn links(secret: &str) -> DraftLinks {
        DraftLinks::new(secret.to_owned().into(), "https://desk.example/", DAY)
    }

    fn link(url: &str) -> &str {
        url.split_once("?link=").expect("a link").1
    }

    #[test]
    fn a_link_is_valid_in_every_process_until_it_expires() {
        let draft = DraftVersion { number: 3, draft_id: Uuid::from_u128(7), version: 2 };
        for action in [LinkAction::Approve, LinkAction::Reject] {
            let url = links("one secret").url(draft, action, NOW);
            assert!(url.starts_with("https://desk.example/links/drafts/3?link=v1.3."), "{url}");
            let verify = |now| links("one secret").verify(link(&url), now);
            assert_eq!(verify(NOW), Ok(VerifiedLink { draft, action }));
            assert!(verify(NOW.after(DAY).before(Duration::from_secs(1))).is_ok());
            assert_eq!(verify(NOW.after(DAY)), Err(LinkError::Expired));
            let other = links("other secret").verify(link(&url), NOW);
            assert_eq!(other, Err(LinkError::Invalid));
        }
    }

    #[test]
    fn a_link_with_any_changed_part_is_invalid() {
        let draft = DraftVersion { number: 3, draft_id: Uuid::from_u128(7), version: 2 };
        let url = links("one secret").url(draft, LinkAction::Reject, NOW);
        let parts: Vec<&str> = link(&url).split('.').collect();
        let id = Uuid::from_u128(8).simple().to_string();
        for (place, other) in [
            (0, "v2"),
            (1, "4"),
            (2, &id),
            (3, "3"),
            (4, "approve"),
            (5, "9999999999"),
            (6, ""),
            (6, "00"),
        ] {
            let mut changed = parts.clone();
            changed[place] = other;
            let changed = changed.join(".");
            assert_eq!(links("one secret").verify(&changed, NOW), Err(LinkError::Invalid));
        }
        for wrong in ["", ".", "......", &"x".repeat(LINK_BYTES_MAX + 1), &parts[..6].join(".")] {
            assert_eq!(links("one secret").verify(wrong, NOW), Err(LinkError::Invalid), "{wrong}");
        }
        let never = links("one secret").url(draft, LinkAction::Approve, Timestamp::from_millis(0));
        assert_eq!(links("one secret").verify(link(&never), NOW), Err(LinkError::Expired));
    }
}
