//! Keeps responses in memory, so that later requests can refer to them.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::item::Item;
use super::object::{ResponseObject, ResponseStatus};
use super::output::Output;
use crate::server::tenant::Tenant;

/// The maximum memory for the stored responses of one tenant, in bytes.
/// Above this limit, the least recently used responses are dropped.
const MAX_BYTES: usize = 64 << 20;

/// The maximum time for which a stored response is available after its last use.
const MAX_AGE: Duration = Duration::from_secs(30 * 60);

/// The stored responses and the streamed responses in progress of all tenants.
/// A tenant cannot refer to the responses of another tenant.
#[derive(Default)]
pub struct Store(Mutex<HashMap<Tenant, Responses>>);

/// Gives access to the responses of one tenant: stored responses and streamed responses in progress.
pub struct TenantStore {
    store: Arc<Store>,
    tenant: Tenant,
}

/// A stored response that has ended, with its input.
pub struct StoredResponse {
    pub object: ResponseObject,
    pub input: Vec<Arc<Item>>,
}

#[derive(Default)]
struct Responses {
    ended: HashMap<String, EndedResponse>,
    /// For each item id, the id of the item's response and the item's index in [`StoredResponse::items`].
    items: HashMap<String, (String, usize)>,
    /// The ids of the responses in `ended`, from the least to the most recently used.
    order: BTreeMap<u64, String>,
    next_use: u64,
    bytes: usize,
    running: HashMap<String, Running>,
}

struct EndedResponse {
    response: Arc<StoredResponse>,
    bytes: usize,
    /// The key of this response in `order`.
    last_use: u64,
    used_at: Instant,
}

/// A streamed response in progress. A response that is not streamed is not listed, because no client knows its id yet.
struct Running {
    object: ResponseObject,
    output: Arc<Mutex<Output>>,
    cancel: Option<oneshot::Sender<()>>,
}

impl TenantStore {
    pub fn new(store: Arc<Store>, tenant: Tenant) -> Self {
        Self { store, tenant }
    }

    /// Removes expired responses. Then, calls `call` with the responses of this tenant and the current time.
    fn with<T>(&self, call: impl FnOnce(&mut Responses, Instant) -> T) -> T {
        self.with_time(Instant::now(), call)
    }

    /// Like [`with`](Self::with), for tests that choose the current time.
    fn with_time<T>(&self, now: Instant, call: impl FnOnce(&mut Responses, Instant) -> T) -> T {
        let mut tenants = self.store.lock();
        // Look at all tenants, because the responses of a tenant that sends no more requests must expire too.
        // If nothing has expired, `evict` looks only at the oldest response of each tenant.
        tenants.values_mut().for_each(|responses| responses.evict(now));
        call(tenants.entry(self.tenant).or_default(), now)
    }

    /// Stores a response.
    pub fn insert(&self, response: StoredResponse) {
        self.with(|responses, now| responses.insert(response, now));
    }

    /// Returns a stored response, or `None` if no response with this id is stored.
    pub fn get(&self, id: &str) -> Option<Arc<StoredResponse>> {
        self.with(|responses, now| responses.get(id, now))
    }

    /// Returns an item of a stored response, or `None` if the item is not stored.
    /// If several responses have the item, it is found only while the latest of these responses is stored.
    pub fn item(&self, id: &str) -> Option<Arc<Item>> {
        self.with(|responses, now| responses.item(id, now))
    }

    /// Returns the conversation up to the end of a response.
    /// If this response or an earlier one is not stored, returns the id of the missing response as the error.
    pub fn conversation(&self, id: &str) -> Result<Vec<Arc<Item>>, String> {
        self.with(|responses, now| responses.conversation(id, now))
    }

    /// Deletes a stored response. Returns false if no response with this id was stored.
    pub fn remove(&self, id: &str) -> bool {
        self.with(|responses, _| responses.remove(id))
    }

    /// Lists a response as in progress until the returned guard is dropped. `output` collects its output items.
    /// If the response is canceled, the returned receiver receives a message.
    pub fn start(&self, object: &ResponseObject, output: &Arc<Mutex<Output>>) -> (RunningGuard, oneshot::Receiver<()>) {
        let (sender, receiver) = oneshot::channel();
        let running = Running { object: object.clone(), output: output.clone(), cancel: Some(sender) };
        self.with(|responses, _| responses.running.insert(object.id.clone(), running));
        let store = TenantStore { store: self.store.clone(), tenant: self.tenant };
        (RunningGuard { store, id: object.id.clone() }, receiver)
    }

    /// Returns a stored response, or a response in progress that will be stored, with its output so far.
    ///
    /// One lock covers both lookups. Otherwise, a response that ends between them would not be found.
    pub fn object(&self, id: &str) -> Option<ResponseObject> {
        self.with(|responses, now| {
            // For a short time, a response that has ended is both stored and listed as in progress.
            if let Some(ended) = responses.get(id, now) {
                return Some(ended.object.clone());
            }
            responses.running.get(id).map(Running::snapshot).filter(|object| object.settings.store)
        })
    }

    /// Cancels a response in progress and returns it. If the response has ended and is stored, returns it unchanged.
    pub fn cancel(&self, id: &str) -> Option<ResponseObject> {
        self.with(|responses, now| {
            if let Some(ended) = responses.get(id, now) {
                return Some(ended.object.clone());
            }
            let running = responses.running.get_mut(id)?;
            if let Some(cancel) = running.cancel.take() {
                // Sending fails only if the response has just ended. In that case, there is nothing to cancel.
                let _ = cancel.send(());
            }
            running.object.set_status(ResponseStatus::Cancelled);
            Some(running.snapshot())
        })
    }
}

impl Running {
    /// Returns the response with its output so far.
    fn snapshot(&self) -> ResponseObject {
        let mut object = self.object.clone();
        object.output = self.output.lock().unwrap_or_else(PoisonError::into_inner).items();
        object
    }
}

/// While this guard lives, the store lists a response as in progress.
pub struct RunningGuard {
    store: TenantStore,
    id: String,
}

impl RunningGuard {
    /// Returns the store that contains the response.
    pub fn store(&self) -> &TenantStore {
        &self.store
    }
}

impl Drop for RunningGuard {
    fn drop(&mut self) {
        self.store.with(|responses, _| responses.running.remove(&self.id));
    }
}

impl Store {
    fn lock(&self) -> MutexGuard<'_, HashMap<Tenant, Responses>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StoredResponse {
    /// Returns the items of the response: its input, then its output.
    fn items(&self) -> impl Iterator<Item = &Arc<Item>> {
        self.input.iter().chain(&self.object.output)
    }

    fn bytes(&self) -> usize {
        self.object.bytes() + self.items().map(|item| item.bytes()).sum::<usize>()
    }
}

impl Responses {
    fn insert(&mut self, response: StoredResponse, now: Instant) {
        let id = response.object.id.clone();
        for (index, item) in response.items().enumerate() {
            self.items.insert(item.id.clone(), (id.clone(), index));
        }
        let bytes = response.bytes();
        self.bytes += bytes;
        self.ended.insert(id.clone(), EndedResponse { response: Arc::new(response), bytes, last_use: 0, used_at: now });
        self.touch(&id, now);
        self.evict(now);
    }

    /// Returns a stored response and marks it as recently used.
    fn get(&mut self, id: &str, now: Instant) -> Option<Arc<StoredResponse>> {
        self.touch(id, now);
        self.ended.get(id).map(|entry| entry.response.clone())
    }

    fn item(&mut self, id: &str, now: Instant) -> Option<Arc<Item>> {
        let (response, index) = self.items.get(id)?.clone();
        self.get(&response, now)?.items().nth(index).cloned()
    }

    fn conversation(&mut self, id: &str, now: Instant) -> Result<Vec<Arc<Item>>, String> {
        let mut turns = Vec::new();
        let mut next = Some(id.to_string());
        while let Some(id) = next {
            let turn = self.get(&id, now).ok_or(id)?;
            next = turn.object.settings.previous_response_id.clone();
            turns.push(turn);
        }
        Ok(turns.iter().rev().flat_map(|turn| turn.items()).cloned().collect())
    }

    fn remove(&mut self, id: &str) -> bool {
        let Some(EndedResponse { response, bytes, last_use, .. }) = self.ended.remove(id) else { return false };
        self.order.remove(&last_use);
        self.bytes -= bytes;
        for item in response.items() {
            // If a client sent the same item again, the item belongs to the later response, so keep it.
            if self.items.get(&item.id).is_some_and(|(owner, _)| owner == id) {
                self.items.remove(&item.id);
            }
        }
        true
    }

    fn touch(&mut self, id: &str, now: Instant) {
        let Some(entry) = self.ended.get_mut(id) else { return };
        self.order.remove(&entry.last_use);
        self.next_use += 1;
        (entry.last_use, entry.used_at) = (self.next_use, now);
        self.order.insert(self.next_use, id.to_string());
    }

    /// Removes expired responses. Then, removes the least recently used responses while the memory limit is exceeded.
    fn evict(&mut self, now: Instant) {
        while let Some(oldest) = self.order.values().next() {
            let is_old = self.ended.get(oldest).is_none_or(|entry| now.duration_since(entry.used_at) > MAX_AGE);
            if !is_old && self.bytes <= MAX_BYTES {
                break;
            }
            let oldest = oldest.clone();
            self.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::item::{ItemContent, ItemStatus};
    use super::super::object::Settings;
    use super::super::output::ResponseParts;
    use super::*;
    use crate::chat::Role;
    use crate::server::generation::event_stream::NoEvents;

    fn item(id: &str, bytes: usize) -> Arc<Item> {
        let content = ItemContent::Message { role: Role::User, text: "x".repeat(bytes), logprobs: Vec::new() };
        Arc::new(Item { id: id.to_string(), status: ItemStatus::Completed, content })
    }

    /// Stores a response with one input item. Returns the id of the response.
    fn insert(responses: &mut Responses, previous: Option<&str>, item: Arc<Item>, now: Instant) -> String {
        let mut settings = Settings::example();
        settings.previous_response_id = previous.map(str::to_string);
        let object = ResponseObject::new(settings);
        let id = object.id.clone();
        responses.insert(StoredResponse { object, input: vec![item] }, now);
        id
    }

    fn is_empty(responses: &Responses) -> bool {
        responses.ended.is_empty() && responses.items.is_empty() && responses.order.is_empty() && responses.bytes == 0
    }

    #[test]
    fn a_response_is_found_at_every_moment_of_its_end() {
        let store = TenantStore::new(Arc::default(), Tenant::default());
        let mut object = ResponseObject::new(Settings::example());
        let output = Arc::new(Mutex::new(Output::new(ResponseParts::default())));
        let status = |found: Option<ResponseObject>| found.map(|object| object.status);
        let (guard, mut canceled) = store.start(&object, &output);
        assert_eq!(status(store.object(&object.id)), Some(ResponseStatus::InProgress));
        // The response ends with one output item, which the store shows even before the response is stored.
        output.lock().unwrap().finish(ItemStatus::Completed, &mut NoEvents);
        object.output = output.lock().unwrap().items();
        assert_eq!(store.object(&object.id).map(|object| object.output.len()), Some(1));
        object.set_status(ResponseStatus::Completed);
        store.insert(StoredResponse { object: object.clone(), input: Vec::new() });
        let mut check_ended = || {
            assert_eq!(status(store.object(&object.id)), Some(ResponseStatus::Completed));
            assert_eq!(status(store.cancel(&object.id)), Some(ResponseStatus::Completed));
            assert!(canceled.try_recv().is_err(), "a response that has ended was canceled");
        };
        check_ended();
        drop(guard);
        check_ended();
    }

    #[test]
    fn a_running_response_that_will_not_be_stored_can_only_be_canceled() {
        let store = TenantStore::new(Arc::default(), Tenant::default());
        let object = ResponseObject::new(Settings { store: false, ..Settings::example() });
        let output = Arc::new(Mutex::new(Output::new(ResponseParts::default())));
        let (_guard, mut canceled) = store.start(&object, &output);
        assert!(store.object(&object.id).is_none());
        assert!(store.cancel(&object.id).is_some() && canceled.try_recv().is_ok());
    }

    #[test]
    fn conversations_consist_of_all_turns() {
        let (mut responses, now) = (Responses::default(), Instant::now());
        let first = insert(&mut responses, None, item("a", 1), now);
        let second = insert(&mut responses, Some(&first), item("b", 1), now);
        let third = insert(&mut responses, Some(&second), item("c", 1), now);
        let ids = |items: Vec<Arc<Item>>| items.iter().map(|item| item.id.clone()).collect::<String>();
        assert_eq!(responses.conversation(&third, now).map(ids), Ok("abc".to_string()));
        assert!(responses.item("b", now).is_some() && responses.item("d", now).is_none());
        assert!(responses.remove(&second) && !responses.remove(&second));
        assert_eq!(responses.conversation(&third, now).map(ids), Err(second));
        assert!(responses.item("b", now).is_none());
    }

    #[test]
    fn items_belong_to_the_last_response_that_has_them() {
        let (mut responses, now) = (Responses::default(), Instant::now());
        let first = insert(&mut responses, None, item("a", 1), now);
        let second = insert(&mut responses, None, item("a", 2), now);
        responses.remove(&first);
        assert!(responses.item("a", now).is_some());
        responses.remove(&second);
        assert!(is_empty(&responses));
    }

    #[test]
    fn the_least_recently_used_responses_make_room() {
        let (mut responses, now) = (Responses::default(), Instant::now());
        let quarter = MAX_BYTES / 4;
        let ids: Vec<String> =
            ["a", "b", "c"].iter().map(|id| insert(&mut responses, None, item(id, quarter), now)).collect();
        assert!(responses.get(&ids[0], now).is_some());
        insert(&mut responses, None, item("d", quarter), now);
        let left = ids.iter().map(|id| responses.get(id, now).is_some()).collect::<Vec<_>>();
        assert_eq!(left, [true, false, true]);
        assert!(responses.bytes <= MAX_BYTES);
        // A response that is larger than the limit evicts all other responses and then itself.
        insert(&mut responses, None, item("e", MAX_BYTES), now);
        assert!(is_empty(&responses));
    }

    #[test]
    fn the_limit_counts_the_settings_that_a_response_repeats() {
        let text = || "x".repeat(1000);
        let changes: [fn(&mut Settings, String); 6] = [
            |settings, text| settings.instructions = Some(text),
            |settings, text| settings.tools = vec![json!({"name": text})],
            |settings, text| settings.tool_choice = json!({"name": text}),
            |settings, text| settings.text = json!({"format": {"schema": {text: 1}}}),
            |settings, text| drop(settings.metadata.insert(text, json!(1))),
            |settings, text| drop(settings.metadata.insert("key".to_string(), json!(text))),
        ];
        let bytes = |settings| StoredResponse { object: ResponseObject::new(settings), input: Vec::new() }.bytes();
        let plain = bytes(Settings::example());
        for (index, change) in changes.iter().enumerate() {
            let mut settings = Settings::example();
            change(&mut settings, text());
            assert!(bytes(settings) >= plain + 1000, "change {index} is not counted");
        }
    }

    #[test]
    fn responses_expire_after_their_last_use() {
        let (store, now) = (TenantStore::new(Arc::default(), Tenant::default()), Instant::now());
        let insert_item = |id| store.with_time(now, |responses, now| insert(responses, None, item(id, 1), now));
        let (used, unused) = (insert_item("a"), insert_item("b"));
        let is_stored = |id: &str, now| store.with_time(now, |responses, now| responses.get(id, now).is_some());
        let later = now + MAX_AGE;
        assert!(is_stored(&used, later));
        let last = later + Duration::from_secs(1);
        assert!(!is_stored(&unused, last));
        assert!(store.with_time(last, |responses, now| responses.item("b", now).is_none()));
        assert!(is_stored(&used, last));
        assert!(!is_stored(&used, last + MAX_AGE + Duration::from_secs(1)));
        assert!(store.with_time(last, |responses, _| is_empty(responses)));
    }

    #[test]
    fn tenants_do_not_evict_each_others_responses() {
        let (store, now) = (Arc::<Store>::default(), Instant::now());
        let [quiet, busy] = [0, 1].map(|index| TenantStore::new(store.clone(), Tenant::new(index)));
        let insert_into = |tenant: &TenantStore, bytes| {
            tenant.with_time(now, |responses, now| insert(responses, None, item("a", bytes), now))
        };
        let kept = insert_into(&quiet, MAX_BYTES / 2);
        let evicted = insert_into(&busy, MAX_BYTES / 2);
        insert_into(&busy, MAX_BYTES / 2);
        assert!(quiet.get(&kept).is_some() && busy.get(&kept).is_none());
        assert!(busy.get(&evicted).is_none());
        // A call of one tenant also removes the expired responses of the other tenant.
        busy.with_time(now + 2 * MAX_AGE, |_, _| ());
        assert!(is_empty(&store.lock()[&quiet.tenant]));
    }
}
