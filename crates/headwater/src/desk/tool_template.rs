//! Templates of HTTP tools: values of a call in a URL or a JSON body.
//!
//! Upstream: `http_tool`. Guarantees: a value cannot leave its place: in a URL it is percent-encoded, and a value that is a whole
//! path segment is neither empty nor `.` nor `..`; in a body it is a JSON value or part of a JSON string. The host is never
//! a variable. Every variable of a template is known. No I/O.

use reqwest::Url;
use serde_json::Value as Json;

use crate::desk::tool::ToolRequest;
use crate::text;

/// The variable with the idempotency key of a call.
pub(super) const KEY_VARIABLE: &str = "idempotency_key";

/// Variables with facts about the issue, which the model cannot choose.
const ISSUE_VARIABLES: [&str; 4] = ["issue.integration", "issue.project", "issue.id", "issue.user"];

/// A text with variables in braces; `{{` and `}}` are braces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ToolText(Vec<ToolTextPart>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum ToolTextPart {
    Text(String),
    Variable(String),
}

/// Whether a template may use a variable.
pub(super) fn is_known(parameters: &Json, name: &str) -> bool {
    let of_call = parameters.get("properties").and_then(|properties| properties.get(name));
    of_call.is_some() || name == KEY_VARIABLE || ISSUE_VARIABLES.contains(&name)
}

/// The value of a variable; null if the model did not give it.
fn value(request: &ToolRequest, name: &str) -> Result<Json, String> {
    Ok(match name {
        KEY_VARIABLE => request.idempotency_key.clone().into(),
        "issue.integration" => request.integration.clone().into(),
        "issue.project" => request.external_project_id.clone().into(),
        "issue.id" => request.external_issue_id.clone().into(),
        "issue.user" => request.user_id.clone().ok_or("the user of this issue is unknown")?.into(),
        name => request.arguments.get(name).cloned().unwrap_or_default(),
    })
}

fn plain_text(value: Json) -> String {
    match value {
        Json::String(text) => text,
        Json::Null => String::new(),
        other => other.to_string(),
    }
}

impl ToolText {
    fn parse(text: &str, parameters: &Json) -> Result<Self, String> {
        let (mut parts, mut plain, mut rest) = (Vec::new(), String::new(), text);
        while let Some(place) = rest.find(['{', '}']) {
            plain.push_str(&rest[..place]);
            let found = &rest[place..];
            if let Some(after) = found.strip_prefix("{{") {
                (plain, rest) = (plain + "{", after);
            } else if let Some(after) = found.strip_prefix("}}") {
                (plain, rest) = (plain + "}", after);
            } else if let Some((name, after)) =
                found.strip_prefix('{').and_then(|name| name.split_once('}'))
            {
                if !is_known(parameters, name) {
                    let shown = text::one_line(name, 60);
                    return Err(format!(
                        "unknown variable `{shown}`; allowed: the properties of `parameters`, `{KEY_VARIABLE}`, `{}`",
                        ISSUE_VARIABLES.join("`, `")
                    ));
                }
                if !plain.is_empty() {
                    parts.push(ToolTextPart::Text(std::mem::take(&mut plain)));
                }
                parts.push(ToolTextPart::Variable(name.to_owned()));
                rest = after;
            } else {
                return Err("a brace is not closed; write `{{` or `}}` for a brace".to_owned());
            }
        }
        plain.push_str(rest);
        if !plain.is_empty() {
            parts.push(ToolTextPart::Text(plain));
        }
        Ok(Self(parts))
    }

    fn has_variables(&self) -> bool {
        self.0.iter().any(|part| matches!(part, ToolTextPart::Variable(_)))
    }

    fn render(&self, request: &ToolRequest, encode: fn(&str) -> String) -> Result<String, String> {
        let part = |part: &ToolTextPart| match part {
            ToolTextPart::Text(text) => Ok(text.clone()),
            ToolTextPart::Variable(name) => Ok(encode(&plain_text(value(request, name)?))),
        };
        self.0.iter().map(part).collect()
    }
}

/// A URL whose path and query may have variables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct UrlTemplate {
    /// Scheme, host and port.
    origin: Url,
    segments: Vec<ToolText>,
    query: Option<ToolText>,
}

impl UrlTemplate {
    pub(super) fn parse(template: &str, parameters: &Json) -> Result<Self, String> {
        let (scheme, rest) =
            template.split_once("://").ok_or("it must begin with `https://` or `http://`")?;
        if !["http", "https"].contains(&scheme) {
            return Err("it must begin with `https://` or `http://`".to_owned());
        }
        if template.contains('#') {
            return Err("it must not have a fragment (`#`)".to_owned());
        }
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (host, rest) = rest.split_at(end);
        if host.contains(['{', '}', '@']) {
            return Err("its host must be fixed, without variables and user names".to_owned());
        }
        let origin = Url::parse(&format!("{scheme}://{host}/"));
        let origin = origin.map_err(|error| format!("it is not a URL: {error}"))?;
        let (path, query) = match rest.split_once('?') {
            Some((path, query)) => (path, Some(query)),
            None => (rest, None),
        };
        let path = path.strip_prefix('/').unwrap_or(path);
        let segments = path.split('/').map(|one| ToolText::parse(one, parameters));
        let query = query.map(|query| ToolText::parse(query, parameters)).transpose()?;
        Ok(Self { origin, segments: segments.collect::<Result<_, _>>()?, query })
    }

    /// Its host, in lower case.
    pub(super) fn host(&self) -> &str {
        self.origin.host_str().unwrap_or_default()
    }

    /// Whether this URL has the same scheme, host and port.
    pub(super) fn is_origin_of(&self, url: &Url) -> bool {
        self.origin.origin() == url.origin()
    }

    pub(super) fn render(&self, request: &ToolRequest) -> Result<Url, String> {
        let mut path = String::new();
        for segment in &self.segments {
            let rendered = segment.render(request, text::percent_encoded)?;
            if segment.has_variables() && matches!(rendered.as_str(), "" | "." | "..") {
                return Err(format!("`{rendered}` cannot be part of the path of the URL"));
            }
            path.push('/');
            path.push_str(&rendered);
        }
        let mut url = format!("{}{path}", self.origin.as_str().trim_end_matches('/'));
        if let Some(query) = &self.query {
            url.push('?');
            url.push_str(&query.render(request, text::percent_encoded)?);
        }
        Url::parse(&url).map_err(|error| format!("the values give no URL: {error}"))
    }
}

/// A JSON body. A string that is one variable becomes its value; in other strings variables are replaced by their text.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum BodyTemplate {
    Text(ToolText),
    Array(Vec<BodyTemplate>),
    Object(Vec<(String, BodyTemplate)>),
    Fixed(Json),
}

impl BodyTemplate {
    pub(super) fn parse(body: &Json, parameters: &Json) -> Result<Self, String> {
        Ok(match body {
            Json::String(text) => Self::Text(ToolText::parse(text, parameters)?),
            Json::Array(items) => {
                let items = items.iter().map(|item| Self::parse(item, parameters));
                Self::Array(items.collect::<Result<_, _>>()?)
            }
            Json::Object(fields) => {
                let fields = fields
                    .iter()
                    .map(|(name, field)| Ok((name.clone(), Self::parse(field, parameters)?)));
                Self::Object(fields.collect::<Result<_, String>>()?)
            }
            other => Self::Fixed(other.clone()),
        })
    }

    pub(super) fn render(&self, request: &ToolRequest) -> Result<Json, String> {
        Ok(match self {
            Self::Text(text) => match &text.0[..] {
                [ToolTextPart::Variable(name)] => value(request, name)?,
                _ => text.render(request, str::to_owned)?.into(),
            },
            Self::Array(items) => {
                items.iter().map(|item| item.render(request)).collect::<Result<_, _>>()?
            }
            Self::Object(fields) => {
                let fields = fields
                    .iter()
                    .map(|(name, field)| Ok::<_, String>((name.clone(), field.render(request)?)));
                Json::Object(fields.collect::<Result<_, _>>()?)
            }
            Self::Fixed(value) => value.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn request(arguments: Json) -> ToolRequest {
        ToolRequest {
            tool: "t".into(),
            arguments,
            idempotency_key: "key-1".into(),
            integration: "shop".into(),
            external_project_id: "p".into(),
            external_issue_id: "7".into(),
            user_id: None,
        }
    }

    fn parameters() -> Json {
        json!({"type": "object", "properties": {"a": {}, "b": {}}})
    }

    fn url(template: &str, arguments: Json) -> Result<String, String> {
        let template = UrlTemplate::parse(template, &parameters())?;
        template.render(&request(arguments)).map(String::from)
    }

    #[test]
    fn values_stay_in_their_place_of_a_url() {
        let template =
            "https://h.example:8443/v1/{a}/x?q={b}&k={idempotency_key}&i={issue.integration}";
        let rendered = url(template, json!({"a": "ä/../?#", "b": "1&admin=true"})).unwrap();
        let expected =
            "https://h.example:8443/v1/%C3%A4%2F..%2F%3F%23/x?q=1%26admin%3Dtrue&k=key-1&i=shop";
        assert_eq!(rendered, expected);
        assert_eq!(url("http://h", json!({})).unwrap(), "http://h/");
        assert_eq!(url("http://h/{a}", json!({"a": 1.5})).unwrap(), "http://h/1.5");
        for bad in [json!({}), json!({"a": ""}), json!({"a": "."}), json!({"a": ".."})] {
            assert!(url("http://h/{a}/x", bad.clone()).is_err(), "{bad}");
        }
        // Also if several values are joined to it.
        assert!(url("http://h/{a}{b}/x", json!({"a": ".", "b": "."})).is_err());
        assert!(url("http://h/{issue.user}", json!({})).unwrap_err().contains("unknown"));
    }

    #[test]
    fn invalid_templates_are_rejected() {
        for (template, expected) in [
            ("ftp://h/", "https://"),
            ("h/x", "https://"),
            ("https://{a}.example/", "host must be fixed"),
            ("https://user@h/", "host must be fixed"),
            ("https:///x", "not a URL"),
            ("https://h/#{a}", "fragment"),
            ("https://h/{c}", "unknown variable `c`"),
            ("https://h/{a", "not closed"),
            ("https://h/a}", "not closed"),
        ] {
            let error = UrlTemplate::parse(template, &parameters()).unwrap_err();
            assert!(error.contains(expected), "{template}: {error}");
        }
    }

    #[test]
    fn a_body_keeps_the_types_of_values() {
        let body =
            json!({"n": "{a}", "text": "say {b} {{x}}", "list": ["{b}", 1, null], "{a}": true});
        let template = BodyTemplate::parse(&body, &parameters()).unwrap();
        let rendered = template.render(&request(json!({"a": {"x": [1]}, "b": "\"q\""}))).unwrap();
        let expected = json!({"n": {"x": [1]}, "text": "say \"q\" {x}", "list": ["\"q\"", 1, null], "{a}": true});
        assert_eq!(rendered, expected);
        assert!(BodyTemplate::parse(&json!({"x": ["{c}"]}), &parameters()).is_err());
    }

    proptest! {
        #[test]
        fn no_value_changes_the_host_or_the_number_of_segments(a in ".*", b in ".*") {
            let template = UrlTemplate::parse("https://h.example/v1/{a}/end?q={b}", &parameters()).unwrap();
            if let Ok(url) = template.render(&request(json!({"a": a, "b": b}))) {
                prop_assert_eq!(url.host_str(), Some("h.example"));
                prop_assert_eq!(url.path_segments().map(Iterator::count), Some(3));
                prop_assert_eq!(url.query_pairs().count(), 1);
                prop_assert!(url.fragment().is_none());
            }
        }
    }
}
