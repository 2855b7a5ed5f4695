//! A real database under a load of its own: what its clients see, and whether it is intact.

use std::ops::Range;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::sample::rolled_out;
use crate::cluster::build;
use crate::cluster::poll::until;
use crate::cluster::{Cache, Cluster, success};

/// The manifest; `NAMESPACE` and `IMAGE` are replaced.
const MANIFEST: &str = include_str!("database.yaml");
/// The node whose disk holds the database.
const NODE: &str = "node1";
const READY: Duration = Duration::from_mins(2);
/// All the money that pgbench moves is accounted for three times, and each page has a checksum.
const INTACT: &str = "SELECT (SELECT sum(abalance) FROM pgbench_accounts) = (SELECT sum(delta) FROM pgbench_history), \
    (SELECT sum(bbalance) FROM pgbench_branches) = (SELECT sum(delta) FROM pgbench_history), \
    (SELECT sum(tbalance) FROM pgbench_tellers) = (SELECT sum(delta) FROM pgbench_history), \
    (SELECT count(*) FROM pgbench_history) > 0, current_setting('data_checksums')";

/// The database, two readers and a writer in a namespace. Its volume goes with this value.
#[derive(Debug)]
pub struct Database<'a> {
    cluster: &'a Cluster,
    namespace: String,
}

/// What a client saw in one second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Second {
    /// Its end, in seconds since 1970.
    pub at: f64,
    /// Transactions in it.
    pub transactions: f64,
    /// How long they took on average, in milliseconds.
    pub millis: f64,
}

impl<'a> Database<'a> {
    /// Builds the image where it is not cached, and waits until the load is running.
    ///
    /// # Errors
    /// When something cannot be built, or does not come up.
    pub fn install(cluster: &'a Cluster, namespace: &str) -> Result<Self> {
        let archive = cluster.beside(|| build::postgres(&Cache::open()?))?;
        cluster.load_image(&archive)?;
        let database = Self {
            cluster,
            namespace: namespace.to_owned(),
        };
        database.drop_volume()?;
        let script = format!("rm -rf {0} && mkdir {0}", database.directory());
        cluster.node(NODE)?.run(&["sh", "-c", &script])?.text()?;
        let manifest = MANIFEST
            .replace("NAMESPACE", namespace)
            .replace("IMAGE", build::POSTGRES);
        cluster.apply(&manifest)?;
        rolled_out(cluster, namespace, "statefulset/db")?;
        database.exec(&[
            "pgbench", "-i", "-q", "-h", "/tmp", "-U", "postgres", "postgres",
        ])?;
        for clients in ["deployment/reader", "deployment/writer"] {
            rolled_out(cluster, namespace, clients)?;
        }
        Ok(database)
    }

    /// What a client has seen, second by second, as far as its log goes back.
    ///
    /// # Errors
    /// When there is no such pod.
    pub fn seen_by(&self, client: &str) -> Result<Vec<Second>> {
        let log = self.cluster.logs(&self.namespace, client, "pgbench")?;
        Ok(log.lines().filter_map(second).collect())
    }

    /// How many transactions of the writer began in a time, in seconds since 1970, by the database's
    /// own record.
    ///
    /// # Errors
    /// When the database does not answer.
    pub fn written(&self, time: &Range<f64>) -> Result<u64> {
        let query = format!(
            "SELECT count(*) FROM pgbench_history WHERE extract(epoch FROM mtime) BETWEEN {} AND {}",
            time.start, time.end
        );
        self.query(&query)?.parse().context("read a count")
    }

    /// Fails unless all that was ever written is there and agrees.
    ///
    /// # Errors
    /// When it does not.
    pub fn is_intact(&self) -> Result<()> {
        let found = self.query(INTACT)?;
        ensure!(found == "t|t|t|t|on", "the database says {found}");
        Ok(())
    }

    fn query(&self, query: &str) -> Result<String> {
        let argv = ["psql", "-h", "/tmp", "-U", "postgres", "-Atc", query];
        Ok(self.exec(&argv)?.trim().to_owned())
    }

    fn exec(&self, argv: &[&str]) -> Result<String> {
        self.cluster
            .pod_exec(&self.namespace, "db-0", "postgres", argv)
    }

    fn directory(&self) -> String {
        format!("/var/lib/kubelet/{}", self.namespace)
    }

    /// Deletes the volume, which belongs to no namespace; nobody waits for who still uses it.
    fn drop_volume(&self) -> Result<()> {
        let name = &self.namespace;
        let delete = [
            "delete",
            "persistentvolume",
            name,
            "--ignore-not-found",
            "--wait=false",
        ];
        success(&self.cluster.kubectl(&delete)?)?;
        let get = ["persistentvolume", name, "--ignore-not-found"];
        until("no volume of an earlier try", READY, || {
            let old = self.cluster.get(&get)?;
            Ok((old.is_null() || !old["metadata"]["deletionTimestamp"].is_null()).then_some(()))
        })
    }
}

impl Drop for Database<'_> {
    fn drop(&mut self) {
        // The next one begins with it, where this fails.
        let _ = self.drop_volume();
    }
}

/// A line of pgbench's progress: `progress: 1796040123.4 s, 4.9 tps, lat 203.1 ms stddev 1.2, …`.
fn second(line: &str) -> Option<Second> {
    let mut parts = line.strip_prefix("progress: ")?.split(", ");
    let mut number = |before: &str, after: &str| {
        let text = parts.next()?.strip_prefix(before)?;
        text.split_once(after)?.0.parse::<f64>().ok()
    };
    Some(Second {
        at: number("", " s")?,
        transactions: number("", " tps")?,
        millis: number("lat ", " ms")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_read() {
        let line = "progress: 1796040123.412 s, 4.9 tps, lat 203.125 ms stddev 1.207, 0 failed";
        let wanted = Second {
            at: 1_796_040_123.412,
            transactions: 4.9,
            millis: 203.125,
        };
        assert_eq!(second(line), Some(wanted));
        assert_eq!(second("pgbench (15.20 (Debian 15.20-0+deb12u1))"), None);
    }
}
