//! An API server in memory, for tests of whole passes: objects by path, versions, preconditions,
//! and refusals on demand.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use http::{Method, Request, Response, StatusCode};
use kube::{Client, client::Body};
use serde_json::{Value, json};
use tokio::time::sleep;
use tower::service_fn;

/// When a refusal is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum When {
    /// Nothing is done.
    Before,
    /// It is done, but the answer gets lost.
    After,
}

/// The code of a request that is never answered.
pub(crate) const LOST: u16 = 0;

/// Which request fails, and how.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    /// Counts down the requests that it is for; it is for the one at 0 and, if `stays`, for all
    /// after that.
    pub(crate) countdown: usize,
    pub(crate) stays: bool,
    /// Method and a part of the path, as `"POST nodeinjections"`; empty: every write.
    pub(crate) of: &'static str,
    pub(crate) code: u16,
    pub(crate) when: When,
}

impl Refusal {
    /// Of every such request from now on, which are not carried out.
    pub(crate) fn always(of: &'static str, code: u16) -> Self {
        Self {
            countdown: 0,
            stays: true,
            of,
            code,
            when: When::Before,
        }
    }
}

#[derive(Debug, Default)]
struct State {
    objects: BTreeMap<String, Value>,
    version: u64,
    writes: Vec<String>,
    refusal: Option<Refusal>,
    delay: Duration,
}

/// The server; clones are the same one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Server(Arc<Mutex<State>>);

type Answer = Result<Value, (u16, &'static str)>;

impl Server {
    /// A client of it.
    pub(crate) fn client(&self) -> Client {
        let server = self.clone();
        let service = service_fn(move |request: Request<Body>| {
            let server = server.clone();
            async move { Ok::<_, Infallible>(server.answer(request).await) }
        });
        Client::new(service, "default")
    }

    /// Puts an object where its path says.
    pub(crate) fn put(&self, path: &str, object: &impl serde::Serialize) {
        let object = serde_json::to_value(object).unwrap();
        self.lock().store(path, object);
    }

    /// The object at a path.
    pub(crate) fn get<T: serde::de::DeserializeOwned>(&self, path: &str) -> Option<T> {
        let object = self.lock().objects.get(path).cloned()?;
        Some(serde_json::from_value(object).unwrap())
    }

    /// All objects below a path, with their own.
    pub(crate) fn below<T: serde::de::DeserializeOwned>(&self, path: &str) -> Vec<(String, T)> {
        let state = self.lock();
        let found = state.objects.iter().filter(|(p, _)| is_in(p, path));
        found
            .map(|(p, o)| (p.clone(), serde_json::from_value(o.clone()).unwrap()))
            .collect()
    }

    /// The writes so far but those of events, as method and path; forgotten by this.
    pub(crate) fn writes(&self) -> Vec<String> {
        std::mem::take(&mut self.lock().writes)
    }

    /// From now on requests fail like this.
    pub(crate) fn refuse(&self, refusal: impl Into<Option<Refusal>>) {
        self.lock().refusal = refusal.into();
    }

    /// From now on every request takes so long.
    pub(crate) fn slow(&self, delay: Duration) {
        self.lock().delay = delay;
    }

    async fn answer(&self, request: Request<Body>) -> Response<Body> {
        let (parts, body) = request.into_parts();
        let query = parts.uri.query().unwrap_or_default().to_owned();
        if query.contains("watch=true") {
            return std::future::pending().await;
        }
        let body = body.collect_bytes().await.unwrap();
        let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
        let delay = self.lock().delay;
        if !delay.is_zero() {
            sleep(delay).await;
        }
        let answer = self
            .lock()
            .serve(&parts.method, parts.uri.path(), &query, body);
        let (code, value) = match answer {
            Ok(value) => (200, value),
            Err((LOST, _)) => return std::future::pending().await,
            Err((code, reason)) => (
                code,
                json!({"kind": "Status", "apiVersion": "v1", "status": "Failure",
                    "code": code, "reason": reason, "message": format!("refused: {reason}")}),
            ),
        };
        let mut response = Response::new(Body::from(value.to_string().into_bytes()));
        *response.status_mut() = StatusCode::from_u16(code).unwrap();
        response
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn serve(&mut self, method: &Method, path: &str, query: &str, body: Value) -> Answer {
        let is_write = method != Method::GET && !path.contains("/events");
        if is_write {
            self.writes.push(format!("{method} {path}"));
        }
        match self.refused(method, path, is_write) {
            Some((code, When::Before)) => Err((code, reason(code))),
            Some((code, When::After)) => {
                let _ = self.carry_out(method, path, query, body);
                Err((code, reason(code)))
            }
            None => self.carry_out(method, path, query, body),
        }
    }

    fn refused(&mut self, method: &Method, path: &str, is_write: bool) -> Option<(u16, When)> {
        let refusal = self.refusal.as_mut()?;
        let is_meant = match refusal.of.split_once(' ') {
            None => is_write,
            Some((verb, part)) => method == verb && path.contains(part),
        };
        if !is_meant {
            return None;
        }
        if refusal.countdown > 0 {
            refusal.countdown -= 1;
            return None;
        }
        let found = (refusal.code, refusal.when);
        if !refusal.stays {
            self.refusal = None;
        }
        Some(found)
    }

    fn carry_out(&mut self, method: &Method, path: &str, query: &str, body: Value) -> Answer {
        match method.as_str() {
            "GET" => self.read(path, query),
            "POST" | "PATCH" if path.contains("/events") => Ok(body),
            "POST" if path.ends_with("/eviction") => {
                let pod = path.trim_end_matches("/eviction");
                self.remove(pod, &body["deleteOptions"])
            }
            "POST" => self.create(path, body),
            "PUT" => match path.strip_suffix("/status") {
                Some(object) => self.replace_status(object, &body),
                None => self.current(path, &body).map(|_| self.store(path, body)),
            },
            "PATCH" => self.merge(path, &body),
            "DELETE" => self.remove(path, &body),
            other => panic!("{other} {path}"),
        }
    }

    fn read(&self, path: &str, query: &str) -> Answer {
        if let Some(object) = self.objects.get(path) {
            return Ok(object.clone());
        }
        let kinds = [
            "chaosexperiments",
            "pods",
            "nodeinjections",
            "services",
            "endpointslices",
            "nodeagents",
            "nodes",
            "configmaps",
        ];
        if !kinds.iter().any(|kind| path.ends_with(kind)) {
            return Err((404, reason(404)));
        }
        let labels = query
            .split('&')
            .find_map(|p| p.strip_prefix("labelSelector="));
        let wanted = labels.map(|l| l.replace("%3D", "=").replace("%2F", "/"));
        let is_wanted = |object: &&Value| match wanted.as_deref().and_then(|l| l.split_once('=')) {
            None => true,
            Some((key, value)) => object["metadata"]["labels"][key] == value,
        };
        let all = self.objects.iter().filter(|(p, _)| is_in(p, path));
        let items: Vec<&Value> = all.map(|(_, o)| o).filter(is_wanted).collect();
        let version = self.version.to_string();
        Ok(json!({"kind": "List", "apiVersion": "v1",
            "metadata": {"resourceVersion": version}, "items": items}))
    }

    fn create(&mut self, path: &str, mut object: Value) -> Answer {
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let path = format!("{path}/{name}");
        if self.objects.contains_key(&path) {
            return Err((409, "AlreadyExists"));
        }
        object["metadata"]["uid"] = json!(format!("{name}-{}", self.version));
        object["metadata"]["generation"] = json!(1);
        Ok(self.store(&path, object))
    }

    fn replace_status(&mut self, path: &str, new: &Value) -> Answer {
        let mut object = self.current(path, new)?;
        object["status"] = new["status"].clone();
        Ok(self.store(path, object))
    }

    fn merge(&mut self, path: &str, change: &Value) -> Answer {
        let mut object = self.current(path, change)?;
        if change.get("spec").is_some() {
            let generation = object["metadata"]["generation"].as_u64().unwrap_or(0);
            object["metadata"]["generation"] = json!(generation + 1);
        }
        json_patch::merge(&mut object, change);
        let metadata = &object["metadata"];
        let is_held = metadata["finalizers"]
            .as_array()
            .is_some_and(|f| !f.is_empty());
        if metadata.get("deletionTimestamp").is_some() && !is_held {
            self.objects.remove(path);
            return Ok(object);
        }
        Ok(self.store(path, object))
    }

    fn remove(&mut self, path: &str, options: &Value) -> Answer {
        let object = self.objects.get(path).ok_or((404, reason(404)))?.clone();
        let wanted = &options["preconditions"]["uid"];
        if !wanted.is_null() && *wanted != object["metadata"]["uid"] {
            return Err((409, reason(409)));
        }
        self.objects.remove(path);
        self.version += 1;
        Ok(object)
    }

    /// The object at a path, if it is still of the version that `change` is for.
    fn current(&self, path: &str, change: &Value) -> Answer {
        let object = self.objects.get(path).ok_or((404, reason(404)))?;
        let (seen, now) = (
            &change["metadata"]["resourceVersion"],
            &object["metadata"]["resourceVersion"],
        );
        if !seen.is_null() && seen != now {
            return Err((409, reason(409)));
        }
        Ok(object.clone())
    }

    fn store(&mut self, path: &str, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.objects.insert(path.to_owned(), object.clone());
        object
    }
}

/// Whether an object is in a collection, of one namespace or of all.
fn is_in(path: &str, collection: &str) -> bool {
    let Some((parent, _)) = path.rsplit_once('/') else {
        return false;
    };
    let of_all = || {
        let (group, rest) = parent.split_once("/namespaces/")?;
        let (_, kind) = rest.split_once('/')?;
        Some(format!("{group}/{kind}"))
    };
    parent == collection || of_all().as_deref() == Some(collection)
}

fn reason(code: u16) -> &'static str {
    match code {
        400 => "BadRequest",
        403 => "Forbidden",
        404 => "NotFound",
        409 => "Conflict",
        429 => "TooManyRequests",
        _ => "InternalError",
    }
}
