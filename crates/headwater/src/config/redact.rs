//! How values that hold secrets are shown: without them.
//!
//! Upstream: whoever prints or logs a URL. Promises: no password of a URL is ever part of what is shown, however it is
//! spelled, and also if the URL is wrong.

/// What stands for a secret.
pub(crate) const HIDDEN: &str = "***";

/// Words in the name of a query parameter whose value is not to be shown.
const SECRET_WORDS: [&str; 5] = ["pass", "secret", "token", "key", "auth"];

/// A URL without its password. The user stays, the query too, but for what sounds like a secret.
pub(crate) fn url(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return hide_query(url) };
    // The last `@`: a password may hold one, or a `/` or `?`, that nobody has escaped. Rather hide too much than too little.
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
    fn no_password_is_shown_however_it_is_spelled() {
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
    fn what_holds_no_secret_is_shown_as_it_is() {
        for plain in ["embedded:data?sync=always", "sqlite:a/b.db", "redis://localhost:6379/2"] {
            assert_eq!(url(plain), plain);
        }
        assert_eq!(url("redis://ann:x@host/1"), "redis://ann:***@host/1");
    }
}
