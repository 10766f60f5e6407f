//! Hides secrets in values that are printed or logged.
//!
//! Guarantees: no password of a URL is shown, even if the URL is malformed.

/// Replaces a secret.
pub(crate) const HIDDEN: &str = "***";

/// Query parameters whose name contains one of these words are hidden.
const SECRET_WORDS: [&str; 5] = ["pass", "secret", "token", "key", "auth"];

/// Hides the password of a URL and secret query parameters. User, host and other parameters stay visible.
pub(crate) fn url(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return hide_query(url) };
    // Split at the last `@`: a password may contain an unescaped `@`, `/` or `?`. Hide too much rather than too
    // little.
    let shown = match rest.rsplit_once('@') {
        Some((login, place)) => match login.split_once(':') {
            Some((user, _)) => format!("{scheme}://{user}:{HIDDEN}@{place}"),
            None => format!("{scheme}://{HIDDEN}@{place}"),
        },
        None => url.to_owned(),
    };
    hide_query(&shown)
}

fn hide_query(url: &str) -> String {
    let Some((place, query)) = url.split_once('?') else { return url.to_owned() };
    let parameters = query.split('&').map(|parameter| match parameter.split_once('=') {
        Some((name, _)) if is_secret(name) => format!("{name}={HIDDEN}"),
        _ => parameter.to_owned(),
    });
    format!("{place}?{}", parameters.collect::<Vec<_>>().join("&"))
}

fn is_secret(name: &str) -> bool {
    let name = name.to_lowercase();
    SECRET_WORDS.iter().any(|word| name.contains(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_hidden_in_valid_and_malformed_urls() {
        for wrong_or_right in [
            "redis://:hunter2@localhost:6379/",
            "redis://user:hunter2@localhost:6379/0",
            "redis://hunter2@localhost",
            "postgres://ann:hunter2@db.example/headwater?sslmode=require",
            "postgres://ann:p@ss/hunter2?x@db.example/headwater",
            "postgres://db.example/headwater?user=ann&password=hunter2",
            "postgres://db.example/headwater?PGPASSWORD=hunter2",
            "redis://:a:hunter2@localhost",
            "sqlite:file.db?key=hunter2",
        ] {
            let shown = url(wrong_or_right);
            assert!(!shown.contains("hunter2"), "{shown}");
            assert!(shown.contains(HIDDEN), "{shown}");
        }
    }

    #[test]
    fn urls_without_secrets_are_not_changed() {
        for plain in ["embedded:data?sync=always", "sqlite:a/b.db", "redis://localhost:6379/2"] {
            assert_eq!(url(plain), plain);
        }
        assert_eq!(url("redis://ann:x@host/1"), "redis://ann:***@host/1");
    }
}
