//! Consistency check: recorded = processed + pending + quarantined, in total and for every issue.
//!
//! Upstream: operators and tests. Downstream: `admin`, which counts each page of issues in one snapshot, so the result is
//! exact for every issue while work goes on. Not to be confused with the audit log of the binary, which records changes by operators.

use std::fmt;

use crate::admin::ConsistencyReport;
use crate::error::Result;
use crate::limits::{CONSISTENCY_PAGE, PAGE_MAX};
use crate::store::Store;

/// Checks all issues, page by page. Expensive: it reads all event logs.
pub async fn check_consistency(store: &dyn Store) -> Result<ConsistencyReport> {
    store.check_consistency(PAGE_MAX).await
}

/// How many issues the next page of a check should have, after one that checked `checked` of `asked` issues: fewer fit if these have
/// very many event logs.
pub fn next_page(checked: u64, asked: usize) -> usize {
    match usize::try_from(checked).unwrap_or(asked) {
        fitting if fitting < asked => fitting.max(1),
        _ => asked.saturating_mul(2).min(CONSISTENCY_PAGE),
    }
}

impl ConsistencyReport {
    /// Adds the next page, and keeps up to `discrepancies_max` inconsistent issues.
    pub fn add_page(&mut self, page: Self, discrepancies_max: usize) {
        self.issues += page.issues;
        self.recorded += page.recorded;
        self.processed += page.processed;
        self.pending += page.pending;
        self.quarantined += page.quarantined;
        self.discrepancies.extend(page.discrepancies);
        self.discrepancies.truncate(discrepancies_max);
        self.discrepancies_total += page.discrepancies_total;
        self.resume_after = page.resume_after;
    }

    /// Whether the totals match and no issue is inconsistent.
    pub fn is_consistent(&self) -> bool {
        let accounted = self.processed + self.pending + self.quarantined;
        self.recorded == accounted && self.discrepancies_total == 0
    }
}

impl fmt::Display for ConsistencyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { issues, recorded, processed, pending, quarantined, .. } = self;
        let sign = if self.is_consistent() { "=" } else { "does not equal" };
        write!(
            f,
            "{issues} issues: {recorded} recorded {sign} {processed} processed + {pending} pending + {quarantined} quarantined"
        )?;
        for discrepancy in &self.discrepancies {
            write!(f, "; issue {}: {}", discrepancy.issue_id, discrepancy.problem)?;
        }
        let omitted = self.discrepancies_total - self.discrepancies.len() as u64;
        if omitted > 0 { write!(f, "; and {omitted} more") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::Discrepancy;
    use crate::issue::{IssueId, ProcessingStatus};

    #[test]
    fn pages_shrink_to_what_fits_and_grow_again() {
        assert_eq!(next_page(CONSISTENCY_PAGE as u64, CONSISTENCY_PAGE), CONSISTENCY_PAGE);
        assert_eq!([next_page(10, 200), next_page(10, 10), next_page(20, 20)], [10, 20, 40]);
        assert_eq!(next_page(0, 200), 1);
    }

    #[test]
    fn the_report_is_one_sentence_that_names_inconsistent_issues() {
        let mut report = ConsistencyReport {
            issues: 2,
            recorded: 6,
            processed: 3,
            pending: 2,
            quarantined: 1,
            ..ConsistencyReport::default()
        };
        assert!(report.is_consistent());
        assert_eq!(
            report.to_string(),
            "2 issues: 6 recorded = 3 processed + 2 pending + 1 quarantined"
        );
        report.discrepancies_total = 2;
        report.discrepancies.push(Discrepancy {
            issue_id: IssueId(7),
            status: ProcessingStatus::Idle,
            pending_events: 0,
            unprocessed: 1,
            quarantined: false,
            problem: "it is idle with unprocessed event logs".into(),
        });
        assert!(!report.is_consistent());
        let text = report.to_string();
        assert!(
            text.ends_with("issue 7: it is idle with unprocessed event logs; and 1 more"),
            "{text}"
        );
    }
}
