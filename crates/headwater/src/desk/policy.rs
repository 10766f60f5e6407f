//! What the desk does with the issues of one integration: who answers there, and whether a person approves answers.
//!
//! Upstream: `build` makes policies from the settings. Downstream: `conversation` and `handler` read them. No I/O.

use crate::tickets::Author;

/// Associations with a repository that make an author of GitHub more than a stranger.
const KNOWN: [&str; 4] = ["OWNER", "MEMBER", "COLLABORATOR", "CONTRIBUTOR"];

/// What becomes of an answer of the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReplyMode {
    /// It is posted.
    #[default]
    Auto,
    /// It becomes a draft, which is posted when a person approves it.
    Draft,
    /// It becomes an internal note, which is never posted.
    Note,
}

impl ReplyMode {
    /// The name in settings and SQL.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Draft => "draft",
            Self::Note => "note",
        }
    }

    /// Parses a name; `None` if it is unknown.
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Auto, Self::Draft, Self::Note].into_iter().find(|mode| mode.as_str() == name)
    }
}

/// A rule that chooses the mode of an answer. It matches if all of its conditions hold; an empty one always holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModeRule {
    /// The mode of answers that it matches.
    pub mode: ReplyMode,
    /// The author of the newest message has one of these associations with the repository, as GitHub names them.
    pub author_associations: Vec<String>,
    /// Whether the desk has not answered in this conversation before.
    pub first_contact: Option<bool>,
    /// The model called one of these tools.
    pub tools: Vec<String>,
    /// A new message of a user contains one of these texts, in any case.
    pub words: Vec<String>,
    /// Hours of the day in UTC, from the first until before the second; they may pass midnight.
    pub hours: Option<(u8, u8)>,
}

/// The policy of one integration. The default is that of an integration without settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IntegrationPolicy {
    /// Logins of people of the support team, compared without case. With a message of one of them, that person takes the
    /// issue over.
    pub agents: Vec<String>,
    /// The mode of answers that no rule matches.
    pub mode: ReplyMode,
    /// The first rule that matches chooses the mode.
    pub rules: Vec<ModeRule>,
    /// Ids of the models that answer, in the order in which they are tried. Empty: all, in the order of the settings.
    pub models: Vec<String>,
}

/// What rules are compared with.
#[derive(Clone, Debug, Default)]
pub(crate) struct AnswerContext<'a> {
    pub(crate) association: Option<&'a str>,
    pub(crate) is_first_contact: bool,
    /// Names of the tools that the model called.
    pub(crate) tools: &'a [String],
    /// New messages of users.
    pub(crate) texts: Vec<&'a str>,
    /// Hour of the day in UTC.
    pub(crate) hour: u8,
}

impl IntegrationPolicy {
    /// Who wrote a message of this user.
    pub(crate) fn author(&self, name: Option<&str>) -> Author {
        let is_agent =
            name.is_some_and(|name| self.agents.iter().any(|one| one.eq_ignore_ascii_case(name)));
        if is_agent { Author::Agent } else { Author::User }
    }

    /// Whether an answer is certain to be posted without approval, whichever tools the model calls and whenever it ends. The
    /// tools and the hour of `context` are not read.
    pub(crate) fn is_certainly_auto(&self, context: &AnswerContext<'_>) -> bool {
        for rule in &self.rules {
            let always = ModeRule { tools: Vec::new(), hours: None, ..rule.clone() };
            match (always.matches(context), rule.mode) {
                (false, _) => {}
                (true, ReplyMode::Draft | ReplyMode::Note) => return false,
                (true, ReplyMode::Auto) if always == *rule => return true,
                (true, ReplyMode::Auto) => {}
            }
        }
        self.mode == ReplyMode::Auto
    }

    /// The mode of an answer, and what chose it.
    pub(crate) fn choose_mode(&self, context: &AnswerContext<'_>) -> (ReplyMode, String) {
        match self.rules.iter().position(|rule| rule.matches(context)) {
            Some(place) => (self.rules[place].mode, format!("rule {}", place + 1)),
            None => (self.mode, "mode of the integration".to_owned()),
        }
    }
}

impl ModeRule {
    /// Whether it has no condition.
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self { mode: self.mode, ..Self::default() }
    }

    fn matches(&self, context: &AnswerContext<'_>) -> bool {
        let is_one = |names: &[String], name: &str| names.iter().any(|one| one == name);
        let association = self.author_associations.is_empty()
            || context.association.is_some_and(|one| is_one(&self.author_associations, one));
        let contact = self.first_contact.is_none_or(|first| first == context.is_first_contact);
        let tools =
            self.tools.is_empty() || context.tools.iter().any(|one| is_one(&self.tools, one));
        let contains = |text: &&str| {
            let text = text.to_lowercase();
            self.words.iter().any(|word| text.contains(&word.to_lowercase()))
        };
        let words = self.words.is_empty() || context.texts.iter().any(contains);
        let hours = self.hours.is_none_or(|(from, until)| match from <= until {
            true => (from..until).contains(&context.hour),
            false => context.hour >= from || context.hour < until,
        });
        association && contact && tools && words && hours
    }
}

/// Whether an author with this association has never contributed to the repository. Without an association nothing is
/// known, and the author is not treated as a stranger.
pub(crate) fn is_stranger(association: Option<&str>) -> bool {
    association.is_some_and(|association| !KNOWN.contains(&association))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_rule_whose_conditions_all_hold_chooses_the_mode() {
        let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
        let night = ModeRule { mode: ReplyMode::Note, hours: Some((22, 6)), ..ModeRule::default() };
        let owners = ModeRule {
            author_associations: words(&["OWNER"]),
            first_contact: Some(false),
            ..ModeRule::default()
        };
        let refunds = ModeRule {
            words: words(&["Refund"]),
            tools: words(&["close_ticket"]),
            ..night.clone()
        };
        let refunds = ModeRule { hours: None, ..refunds };
        let rules = vec![night, owners, refunds];
        let policy = IntegrationPolicy { mode: ReplyMode::Draft, rules, ..Default::default() };
        let by_day = AnswerContext { hour: 12, ..AnswerContext::default() };
        let (closing, searching) = (words(&["close_ticket"]), words(&["search_tickets"]));
        let refund = AnswerContext { texts: vec!["Hi", "a REFUND, please"], ..by_day.clone() };
        for (context, expected) in [
            (by_day.clone(), (ReplyMode::Draft, "mode of the integration")),
            (AnswerContext { hour: 23, ..by_day.clone() }, (ReplyMode::Note, "rule 1")),
            (AnswerContext { hour: 5, ..by_day.clone() }, (ReplyMode::Note, "rule 1")),
            (
                AnswerContext { hour: 6, ..by_day.clone() },
                (ReplyMode::Draft, "mode of the integration"),
            ),
            (
                AnswerContext { association: Some("OWNER"), ..by_day.clone() },
                (ReplyMode::Auto, "rule 2"),
            ),
            (
                AnswerContext {
                    association: Some("OWNER"),
                    is_first_contact: true,
                    ..by_day.clone()
                },
                (ReplyMode::Draft, "mode of the integration"),
            ),
            (AnswerContext { tools: &closing, ..refund.clone() }, (ReplyMode::Note, "rule 3")),
            (
                AnswerContext { tools: &searching, ..refund },
                (ReplyMode::Draft, "mode of the integration"),
            ),
        ] {
            let (mode, reason) = policy.choose_mode(&context);
            assert_eq!((mode, reason.as_str()), expected, "{context:?}");
        }
    }

    fn asked<'a>(
        text: &'a str,
        is_first_contact: bool,
        tools: &'a [String],
        hour: u8,
    ) -> AnswerContext<'a> {
        AnswerContext { texts: vec![text], is_first_contact, tools, hour, association: None }
    }

    #[test]
    fn an_answer_is_certainly_posted_only_if_no_tool_and_no_hour_makes_it_a_draft() {
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        let modes = [ReplyMode::Auto, ReplyMode::Draft, ReplyMode::Note];
        let rules: Vec<ModeRule> = modes
            .into_iter()
            .flat_map(|mode| {
                let rule = ModeRule { mode, ..ModeRule::default() };
                [
                    ModeRule { tools: names(&["close_ticket"]), ..rule.clone() },
                    ModeRule { hours: Some((22, 6)), ..rule.clone() },
                    ModeRule { words: names(&["refund"]), ..rule.clone() },
                    ModeRule { words: names(&["refund"]), hours: Some((8, 9)), ..rule.clone() },
                    ModeRule { first_contact: Some(true), ..rule },
                ]
            })
            .collect();
        let tools = [Vec::new(), names(&["close_ticket"]), names(&["search_tickets"])];
        let (mut certain, mut all) = (0, 0);
        for (mode, first, second) in modes.into_iter().flat_map(|mode| {
            let pairs = rules.iter().flat_map(|one| rules.iter().map(move |other| (one, other)));
            pairs.map(move |(one, other)| (mode, one, other))
        }) {
            let rules = vec![first.clone(), second.clone()];
            let policy = IntegrationPolicy { mode, rules, ..Default::default() };
            for (text, is_first_contact) in [("a refund", true), ("hello", true), ("hello", false)]
            {
                let is_certain = policy.is_certainly_auto(&asked(text, is_first_contact, &[], 0));
                let is_auto = |tools: &[String], hour| {
                    let context = asked(text, is_first_contact, tools, hour);
                    policy.choose_mode(&context).0 == ReplyMode::Auto
                };
                let always = tools.iter().all(|tools| (0..24).all(|hour| is_auto(tools, hour)));
                assert!(!is_certain || always, "{policy:?} {text} {is_first_contact}");
                (certain, all) = (certain + usize::from(is_certain), all + usize::from(always));
            }
        }
        // It may be too careful, but not always.
        assert!(certain > 100 && certain <= all, "{certain} of {all}");
    }
}
