//! Names and values of a query or of a submitted form. A name may occur several times.

use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;

use crate::screen::error_page;
use crate::text::encoded;

/// Names with their values, in the order in which they were sent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FormFields(Vec<(String, String)>);

impl FormFields {
    /// From a query string.
    pub(crate) fn from_query(query: &str) -> Self {
        let decoded = axum::extract::Query::<Vec<(String, String)>>::try_from_uri(
            &format!("/?{query}").parse().unwrap_or_default(),
        );
        Self(decoded.map(|decoded| decoded.0).unwrap_or_default())
    }

    /// The first value of a name; empty if there is none.
    pub(crate) fn get(&self, name: &str) -> &str {
        self.0.iter().find(|(known, _)| known == name).map_or("", |(_, value)| value)
    }

    /// All values of a name that are not empty.
    pub(crate) fn all(&self, name: &str) -> Vec<&str> {
        let values = self.0.iter().filter(|(known, value)| known == name && !value.is_empty());
        values.map(|(_, value)| value.as_str()).collect()
    }

    /// All names and values, except these names.
    pub(crate) fn without<'a>(
        &'a self,
        names: &'a [&str],
    ) -> impl Iterator<Item = (&'a str, &'a str)> {
        let kept = self.0.iter().filter(|(name, _)| !names.contains(&name.as_str()));
        kept.map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// These names with their values as a query string, without those that are empty.
    pub(crate) fn query_of(&self, names: &[&str]) -> String {
        let pairs = self
            .0
            .iter()
            .filter(|(name, value)| names.contains(&name.as_str()) && !value.is_empty());
        let pairs = pairs.map(|(name, value)| format!("{}={}", encoded(name), encoded(value)));
        pairs.collect::<Vec<_>>().join("&")
    }
}

/// Middleware: reads the submitted form before the action, so that the page of an action that fails can offer it again.
pub(crate) async fn read_form(request: Request, next: Next) -> Response {
    let (mut parts, body) = request.into_parts();
    let form = match parts.headers.contains_key(header::CONTENT_TYPE) {
        // A button of a program, without fields.
        false => Ok(FormFields::default()),
        true => {
            let request = Request::from_parts(parts.clone(), body);
            let form = axum::Form::<Vec<(String, String)>>::from_request(request, &()).await;
            form.map(|form| FormFields(form.0))
        }
    };
    let Ok(form) = form else {
        let message = "the form is not readable, or larger than 2 MB; nothing was changed";
        return error_page(StatusCode::BAD_REQUEST, "invalid", message);
    };
    parts.extensions.insert(form);
    next.run(Request::from_parts(parts, Body::empty())).await
}

/// The submitted form, which [`read_form`] has read.
impl<S: Send + Sync> FromRequestParts<S> for FormFields {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        Ok(parts.extensions.get::<Self>().cloned().unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_may_repeat_and_a_malformed_query_has_none() {
        let fields = FormFields::from_query("id=1-0&id=2-0&q=a%20b&empty=");
        assert_eq!((fields.all("id"), fields.get("q")), (vec!["1-0", "2-0"], "a b"));
        assert_eq!((fields.get("absent"), fields.all("empty").len()), ("", 0));
        assert_eq!(fields.query_of(&["q", "empty"]), "q=a%20b");
        assert_eq!(FormFields::from_query("%").get("q"), "");
    }
}
