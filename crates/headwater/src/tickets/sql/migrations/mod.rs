//! Schema of the tables that the server adds to those of `headwater-issue`: tickets, token budgets, audit log,
//! model runs, drafts, prompts, history of metrics, effects of tools, replay plans.

use headwater_issue::{IssueError, Migration, Store};

/// In order. Versions from 1001; 1 to 999 belong to `headwater-issue`.
const MIGRATIONS: &[Migration] = &[
    Migration {
        version: 1001,
        description: "tickets",
        postgres: include_str!("postgres/1001_tickets.sql"),
        sqlite: include_str!("sqlite/1001_tickets.sql"),
    },
    Migration {
        version: 1002,
        description: "audit log",
        postgres: include_str!("postgres/1002_audit_log.sql"),
        sqlite: include_str!("sqlite/1002_audit_log.sql"),
    },
    Migration {
        version: 1003,
        description: "names of agents",
        postgres: include_str!("postgres/1003_agents.sql"),
        sqlite: include_str!("sqlite/1003_agents.sql"),
    },
    Migration {
        version: 1004,
        description: "model runs",
        postgres: include_str!("postgres/1004_model_runs.sql"),
        sqlite: include_str!("sqlite/1004_model_runs.sql"),
    },
    Migration {
        version: 1005,
        description: "order of imported messages, budget of strangers",
        postgres: include_str!("postgres/1005_order_and_strangers.sql"),
        sqlite: include_str!("sqlite/1005_order_and_strangers.sql"),
    },
    Migration {
        version: 1006,
        description: "drafts",
        postgres: include_str!("postgres/1006_drafts.sql"),
        sqlite: include_str!("sqlite/1006_drafts.sql"),
    },
    Migration {
        version: 1007,
        description: "prompts",
        postgres: include_str!("postgres/1007_prompts.sql"),
        sqlite: include_str!("sqlite/1007_prompts.sql"),
    },
    Migration {
        version: 1008,
        description: "queue of hand-overs",
        postgres: include_str!("postgres/1008_hand_overs.sql"),
        sqlite: include_str!("sqlite/1008_hand_overs.sql"),
    },
    Migration {
        version: 1009,
        description: "history of metrics",
        postgres: include_str!("postgres/1009_metrics_history.sql"),
        sqlite: include_str!("sqlite/1009_metrics_history.sql"),
    },
    Migration {
        version: 1010,
        description: "effects of tools",
        postgres: include_str!("postgres/1010_tool_effects.sql"),
        sqlite: include_str!("sqlite/1010_tool_effects.sql"),
    },
    Migration {
        version: 1011,
        description: "overdue drafts",
        postgres: include_str!("postgres/1011_overdue_drafts.sql"),
        sqlite: include_str!("sqlite/1011_overdue_drafts.sql"),
    },
    Migration {
        version: 1012,
        description: "replay plans",
        postgres: include_str!("postgres/1012_replay_plans.sql"),
        sqlite: include_str!("sqlite/1012_replay_plans.sql"),
    },
    Migration {
        version: 1013,
        description: "runs of model runs",
        postgres: include_str!("postgres/1013_runs_of_model_runs.sql"),
        sqlite: include_str!("sqlite/1013_runs_of_model_runs.sql"),
    },
    Migration {
        version: 1014,
        description: "days of model runs",
        postgres: include_str!("postgres/1014_model_run_days.sql"),
        sqlite: include_str!("sqlite/1014_model_run_days.sql"),
    },
];

/// Applies what is missing. Idempotent; several processes may call it at once.
pub(crate) async fn apply(store: &dyn Store) -> Result<(), IssueError> {
    store.migrate(MIGRATIONS).await
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;

    #[test]
    fn the_text_of_an_applied_migration_has_not_changed() {
        let checksum = |sql: &str| hex::encode(Sha256::digest(sql));
        let checksums: Vec<_> = MIGRATIONS
            .iter()
            .map(|one| [checksum(one.postgres), checksum(one.sqlite)].concat())
            .collect();
        let pinned = [
            "18a017c0e77c0ec85a3498742ea151ebada450bf35114d8a6056f4b4c991ec36eef8496fab2e7f089a07b7e507c3d76590e4d74d41408de26c9e1301ae4b1654",
            "d8e751d49c8ef72502915e5b25c01b395d87453c028135d50e8e802c00940c59aba1c0e5203636f0b5645a8436b27809b4e71390993e20d3d58c423a3d62a6da",
            "86ea806ff9ee5ac8585cb3106437735372faa876a3a614470ab647396254d6e87e4185f4ed3c4ec228c0c01b26c307ed5c0cc22172a8cab6fbfae785e572ae10",
            "4f32b2270fd29402e9c344ab48fe6392663c0d64f2ef2cde423490c0d1755c69e6e73d606cd01a00cf89ca3f5c58d6cff24fdb28d783fd910b0dd998481524ca",
            "338faca37f04f76c918ecd5f85e69963b54ced30a09e915e4be6ca85a97d920555871c98a1d267d2ca29ac2ef304b44c7f6defd9ae92b88bf6c7d0a677705511",
            "5573a218e6f3b9387c647a0e2dd9c59238d61919f3a7c8bd45bf6f26a5b5c4cd5d1010894ee8d98cafbea030078f97c59c10e2185f1ee4d349f3ccce2b476d48",
            "e0c901a1974559435bd4449830b334f68213e5de073db3a296a35390210e137c3dcde4fccd6a971eedfd62c3b7f8531a98276b3275d1090b2a47f38a2248fcab",
            "a59b3bb26cbb93bdf0fab37ceb77bbfa419b30d371f8a58ca14b0621e43d911d16549fd5c554d1edde33f7ad8f9240c2eb08ef3cea36f622f7401f9fcaadad21",
            "97d3feb9b891225a2e5e2151d5f46b7d8f9b83c7e08fc65f5f37bd0c27ed51dbf61875b0321d2dedaeffca1dcf702ecbb617ac1fa1411a50c5afff60f08bb3b1",
            "c2a8b6d00398da53450213dcd7d861efaa37e933323e73904cce4c353dd40c2e614d11270b9d58b9d0c3ad5ec5919af2c101328310e8a46802f43c4df1c57d87",
            "a59dca791529f320f3764cbe642534f0289ad82e7307883465e60e099b6b90769b1c437fccfb4bd5c486c4cedaa9e420f52860272cfba59d74c316279f24e062",
            "b846e6fb3954e761ae91a9c023643298dc071007a7f0f9619f69093f5e429433bb1d15aa353f8e13ab272edc36cd92f469edff2a23283a0ce910e4c52bb1cf59",
            "7f7c144dcefa38337bc9b21bf50c3acafbc0bd3dd46dc6880aed315189f5e58499e6dd17ebfd5ff824596d44ac90014885cc1dcafba8ef6dacfe342e61cb4e4b",
            "8a1396cb2ed6d43e9175b162588defc9a105abb19c4cf36f04786f7313c6f8fb9ec3f9acfbbf20e58e8bfe12390285f96fba26861bc4b55afa188597879f2d08",
        ];
        assert_eq!(checksums, pinned, "do not change a migration: add one, and its checksum here");
    }
}
