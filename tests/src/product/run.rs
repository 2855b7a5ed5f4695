//! An experiment on a cluster: applied, watched, and waited for.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::cluster::poll::until;
use crate::cluster::{Cluster, success};

/// An experiment that was applied. It is deleted when this value is dropped.
#[derive(Debug)]
pub struct Run<'a> {
    cluster: &'a Cluster,
    namespace: String,
    name: String,
}

/// The manifest of an experiment from the YAML of its spec.
#[must_use]
pub fn experiment(namespace: &str, name: &str, spec: &str) -> String {
    let indented = spec.trim_matches('\n').replace('\n', "\n  ");
    format!(
        "apiVersion: windtunnel.dev/v1alpha1\nkind: ChaosExperiment\nmetadata: {{name: {name}, namespace: {namespace}}}\nspec:\n  {indented}\n"
    )
}

impl<'a> Run<'a> {
    /// Applies an experiment with the YAML of its spec.
    ///
    /// # Errors
    /// When it is refused, with what kubectl said.
    pub fn apply(cluster: &'a Cluster, namespace: &str, name: &str, spec: &str) -> Result<Self> {
        cluster.apply(&experiment(namespace, name, spec))?;
        Ok(Self::named(cluster, namespace, name))
    }

    /// An experiment that was applied before, or is no more.
    #[must_use]
    pub fn named(cluster: &'a Cluster, namespace: &str, name: &str) -> Self {
        Self {
            cluster,
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        }
    }

    /// Its status.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn status(&self) -> Result<Value> {
        let object = self.cluster.get(&[
            "chaosexperiment",
            &self.name,
            "--namespace",
            &self.namespace,
        ])?;
        Ok(object["status"].clone())
    }

    /// Its phase; empty before it has one.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn phase(&self) -> Result<String> {
        Ok(self.status()?["phase"]
            .as_str()
            .unwrap_or_default()
            .to_owned())
    }

    /// Waits for a condition as a user would: with `kubectl wait`.
    ///
    /// # Errors
    /// When it does not come in time, with the status as it is then.
    pub fn wait(&self, condition: &str, bound: Duration) -> Result<()> {
        let timeout = format!("--timeout={}s", bound.as_secs());
        let condition = format!("--for=condition={condition}");
        let object = format!("chaosexperiment/{}", self.name);
        let waited = self.cluster.kubectl(&[
            "wait",
            &object,
            "--namespace",
            &self.namespace,
            &condition,
            &timeout,
        ])?;
        match success(&waited) {
            Ok(_) => Ok(()),
            Err(error) => Err(error.context(format!("status: {}", self.status()?))),
        }
    }

    /// Waits until something holds of its status.
    ///
    /// # Errors
    /// When it does not in time, with the status as it is then.
    pub fn until(
        &self,
        what: &str,
        bound: Duration,
        holds: impl Fn(&Value) -> bool,
    ) -> Result<Value> {
        let waited = until(what, bound, || {
            let status = self.status()?;
            Ok(holds(&status).then_some(status))
        });
        waited.or_else(|error| bail!("{error:#}; status: {}", self.status()?))
    }

    /// Status and reason of a condition.
    ///
    /// # Errors
    /// When there is no such condition.
    pub fn condition(&self, type_: &str) -> Result<(String, String)> {
        let status = self.status()?;
        let conditions = status["conditions"].as_array().cloned().unwrap_or_default();
        let found = conditions.iter().find(|c| c["type"] == type_);
        let found = found.with_context(|| format!("no condition {type_} in {status}"))?;
        let text = |field: &str| found[field].as_str().unwrap_or_default().to_owned();
        Ok((text("status"), text("reason")))
    }

    /// Ends it early by `spec.abort`.
    ///
    /// # Errors
    /// When that is refused.
    pub fn abort(&self) -> Result<()> {
        let patch = json!({"spec": {"abort": true}}).to_string();
        let arguments = [
            "patch",
            "chaosexperiment",
            &self.name,
            "--namespace",
            &self.namespace,
            "--type=merge",
            "--patch",
            &patch,
        ];
        success(&self.cluster.kubectl(&arguments)?).map(drop)
    }

    /// Deletes it and waits until it is gone.
    ///
    /// # Errors
    /// When it is still there after `bound`, with the status as it is then.
    pub fn delete(&self, bound: Duration) -> Result<()> {
        let timeout = format!("--timeout={}s", bound.as_secs());
        let arguments = [
            "delete",
            "chaosexperiment",
            &self.name,
            "--namespace",
            &self.namespace,
            "--ignore-not-found",
            &timeout,
        ];
        let deleted = success(&self.cluster.kubectl(&arguments)?).map(drop);
        deleted.or_else(|error| Err(error.context(format!("status: {}", self.status()?))))
    }
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        // A failed test must not leave its fault to the next; there is nobody to tell that even this
        // failed.
        let _ = self.delete(Duration::from_mins(1));
    }
}
